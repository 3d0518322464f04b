"""How fast slot files move, learned from what the server reports, and the deadline that follows."""

from __future__ import annotations

START_BYTES_PER_SECOND = 60e6
"""Before anything was measured: a slow SATA disk."""

MARGIN = 3.0
"""How many times longer than the average a move may take: a page cache flush costs that much."""

MIN_SAMPLE_BYTES = 1 << 20
"""Smaller files measure the fixed cost of a call, not the disk."""

SLOWER_WEIGHT = 0.5
FASTER_WEIGHT = 0.2
"""Believe bad news sooner than good: a deadline too long costs seconds, one too short a snapshot."""


class Rate:
    """The pace of one kind of move (saves or restores) at one server."""

    __slots__ = ("_seconds_per_byte",)

    def __init__(self, bytes_per_second: float = START_BYTES_PER_SECOND) -> None:
        self._seconds_per_byte = 1 / bytes_per_second

    @property
    def bytes_per_second(self) -> float:
        return 1 / self._seconds_per_byte

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Learn from a move of `size_bytes` that took `seconds`, waiting for its turn not counted."""
        if size_bytes < MIN_SAMPLE_BYTES or seconds <= 0:
            return
        sample = seconds / size_bytes
        weight = SLOWER_WEIGHT if sample > self._seconds_per_byte else FASTER_WEIGHT
        self._seconds_per_byte += weight * (sample - self._seconds_per_byte)

    def deadline(self, size_bytes: int, floor_seconds: float, batch_allowance_seconds: float) -> float:
        """Seconds to grant a move of `size_bytes`: it first waits for a running batch, then moves them."""
        move = MARGIN * size_bytes * self._seconds_per_byte
        return max(floor_seconds, batch_allowance_seconds + move)
