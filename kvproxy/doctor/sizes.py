"""How much room conversations take on disk, and numbers as people read them: pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.upstream.replies import Saved

KEPT_GENERATIONS = 2
"""Of each conversation kvproxy keeps the newest snapshot and the one before."""


@dataclass(frozen=True, slots=True)
class Weight:
    """Bytes of a snapshot as a line: recurrent state weighs the same whatever the length."""

    bytes_per_token: float
    fixed_bytes: float

    def of(self, tokens: int) -> int:
        return round(self.fixed_bytes + self.bytes_per_token * tokens)


def weigh(short: Saved, long: Saved | None) -> Weight:
    """From one snapshot, or from two of different length."""
    if long is None or long.tokens <= short.tokens or long.size_bytes < short.size_bytes:
        return Weight(short.size_bytes / short.tokens, 0)
    slope = (long.size_bytes - short.size_bytes) / (long.tokens - short.tokens)
    return Weight(slope, max(0.0, short.size_bytes - slope * short.tokens))


def count(number: int, noun: str) -> str:
    """`1 slot`, `2 slots`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human(size_bytes: float) -> str:
    """In decimal units, as disks are sold."""
    value = float(size_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
