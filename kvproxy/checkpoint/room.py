"""Whether a snapshot will fit on the disk, asked before it is written.

A server that runs out of room in the middle of a save leaves a stump and a full disk, and everything else on
that disk suffers. So what is certain not to fit is not begun.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from kvproxy.doctor.sizes import human
from kvproxy.errors import ErrorCode
from kvproxy.snapshots.files import SnapshotFiles
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.store import SnapshotStore
from kvproxy.telemetry.events import Emit, Warned

ROOM_SHARE = 1.1
"""Of the estimate: sizes are nearly a line, and others write to the disk meanwhile."""

MARGIN_BYTES = 1 << 20
"""For manifests, logs, and a first snapshot, whose size nobody knows."""


def estimated_bytes(tokens: int | None, saved: Iterable[tuple[int, int]]) -> int:
    """What a snapshot of `tokens` will weigh, by those that were `saved` of the same model (tokens, bytes).

    A line through the shortest and the longest: recurrent state weighs the same whatever the length. 0 where
    nothing is known to go by.
    """
    known = sorted(saved)
    if not known or not tokens:
        return 0
    (short, least), (long, most) = known[0], known[-1]
    if long == short or most < least:
        return most * tokens // long if tokens > long else most
    slope = (most - least) / (long - short)
    return max(0, round(least + slope * (tokens - short)))


class Room:
    """Asked before each save. `make_room` lets go of what is beyond the bounds of retention."""

    def __init__(self, files: SnapshotFiles, store: SnapshotStore, emit: Emit) -> None:
        self._files = files
        self._store = store
        self._emit = emit
        self._is_told = False
        self.make_room: Callable[[], Awaitable[object]] = _nothing

    async def lacks(self, fingerprint: Fingerprint, tokens: int | None) -> str | None:
        """Why a snapshot of `tokens` is not to be begun; None if it may. Says so to the operator once,
        until there is room again."""
        needed = self._needed(fingerprint, tokens)
        if (free := await self._files.free_bytes()) is not None and free < needed:
            await self.make_room()
            free = await self._files.free_bytes()
        if free is None or free >= needed:
            self._is_told = False
            return None
        reason = f"{human(free)} are free where the snapshots lie, and {human(needed)} are needed"
        self._tell(reason)
        return reason

    def _needed(self, fingerprint: Fingerprint, tokens: int | None) -> int:
        saved = (
            (one.tokens, one.size_bytes)
            for manifest in self._store.all()
            if manifest.fingerprint == fingerprint
            for one in manifest.generations
        )
        return int(estimated_bytes(tokens, saved) * ROOM_SHARE) + MARGIN_BYTES

    def _tell(self, reason: str) -> None:
        if not self._is_told:
            self._is_told = True
            self._emit(Warned(f"{reason}; nothing is saved until there is room", ErrorCode.SAVE_FAILED))


async def _nothing() -> None:
    """Nothing can be let go of."""
