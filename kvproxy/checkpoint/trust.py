"""How far restores are trusted, by what the answers after them proved: pure.

A server answers a restore with success whether or not the next request can use it. One miss proves little:
a client may have begun anew under the same id. A snapshot that missed twice is not worth a third wait. And
where the restores of several conversations miss, and none hits, the cause lies with the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.checkpoint.outcome import Verdict
from kvproxy.identifiers import SessionKey, SnapshotName
from kvproxy.snapshots.memory_kind import MemoryKind

MISSES_OF_A_SNAPSHOT = 2
MISSES_OF_A_SERVER = 3
"""In a row, of at least two conversations."""

MAX_REMEMBERED = 1000
"""Snapshots that missed once. The oldest are forgotten first, and get their second try."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What follows from one more proof."""

    retires: bool = False
    """The snapshot is not to be restored again."""
    switches_off: bool = False
    """Nothing is to be restored on this server in this life of it."""


class Trust:
    """Trust in the restores of one server."""

    def __init__(self) -> None:
        self._missed: dict[SnapshotName, int] = {}
        self._life: object = None
        self._in_row: list[SessionKey] = []

    def proved(self, life: object, session: SessionKey, name: SnapshotName, verdict: Verdict) -> Conclusion:
        """`life` is anything that differs where misses of before say nothing: epoch and fingerprint."""
        if life != self._life:
            self._life, self._in_row = life, []
        if verdict is Verdict.UNKNOWN:
            return Conclusion()
        if verdict is not Verdict.INEFFECTIVE:
            # Reused in part is reused: the restore worked, and the client went another way.
            self._in_row.clear()
            self._missed.pop(name, None)
            return Conclusion()
        self._in_row.append(session)
        has_failed = len(self._in_row) >= MISSES_OF_A_SERVER and len(set(self._in_row)) > 1
        return Conclusion(self._count(name) >= MISSES_OF_A_SNAPSHOT, has_failed)

    def _count(self, name: SnapshotName) -> int:
        count = self._missed.pop(name, 0) + 1
        if count < MISSES_OF_A_SNAPSHOT:
            self._missed[name] = count
        if len(self._missed) > MAX_REMEMBERED:
            del self._missed[next(iter(self._missed))]
        return count


_LIKELY = {
    MemoryKind.SLIDING_WINDOW: (
        "the model has a sliding window, of which a snapshot holds only the end: "
        "start llama-server with --swa-full"
    ),
    MemoryKind.RECURRENT: (
        "the model is recurrent, so a snapshot serves only what goes on exactly from its end, "
        "and clients here rewrite their last turn"
    ),
    MemoryKind.HYBRID: (
        "the model is a hybrid with recurrent state, so a snapshot serves only what goes on exactly from "
        "its end, and clients here rewrite their last turn"
    ),
}


def likely_reason(kind: MemoryKind) -> str:
    """Why restores reuse nothing, as far as the model's memory tells."""
    cause = _LIKELY.get(kind, "why is not known (run kvproxy doctor)")
    return f"restores succeed, and the answers reuse nothing: {cause}"


def is_saving_useless(kind: MemoryKind) -> bool:
    """Whether the next life of the same server will have no use for what is saved in this one either."""
    return kind in _LIKELY
