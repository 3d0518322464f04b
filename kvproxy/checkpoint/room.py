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
from kvproxy.snapshots.state_dir import MAX_MANIFEST_BYTES
from kvproxy.snapshots.store import SnapshotStore
from kvproxy.telemetry.events import Emit, Warned

ROOM_SHARE = 1.1
"""Of the estimate: sizes are nearly a line, and others write to the disk meanwhile."""

MARGIN_BYTES = 1 << 20
"""For manifests, logs, and a first snapshot, whose size nobody knows."""

ADVICE = "nothing is saved until there is room: make some, or lower retention.max_total_bytes"


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
    """Asked before each save. `make_room` lets go of what is beyond the bounds of retention.

    `lack` is why nothing is saved, for want of room on the disk; empty where none is known to be wanting.
    """

    def __init__(self, files: SnapshotFiles, store: SnapshotStore, emit: Emit) -> None:
        self._files = files
        self._store = store
        self._emit = emit
        self._wanted: int | None = None
        """The bytes that were not there; None if only a save that goes well can show them."""
        self.lack = ""
        self.make_room: Callable[[], Awaitable[object]] = _nothing

    async def lacks(self, fingerprint: Fingerprint, tokens: int | None) -> str | None:
        """Why a snapshot of `tokens` is not to be begun; None if it may. Says so to the operator once,
        until there is room again."""
        needed = self._needed(fingerprint, tokens)
        if (free := await self._files.free_bytes()) is not None and free < needed:
            await self.make_room()
            free = await self._files.free_bytes()
        if free is None or free >= needed:
            if self._wanted is not None:
                self.found()
            return None
        return self._tell(f"{_free(free)}, and {human(needed)} are needed", needed)

    async def ran_out(self) -> str:
        """Why a save failed, if the disk is full now; else empty. To be asked before the stump is deleted."""
        free = await self._files.free_bytes()
        if free is not None and free < MARGIN_BYTES:
            return self._tell(_free(free), None)
        free = await self._store.free_bytes()
        if free is not None and free < MAX_MANIFEST_BYTES:
            return self._tell(f"{human(free)} are free where the state directory lies", None)
        return ""

    def found(self) -> None:
        """There is room again."""
        self._wanted, self.lack = None, ""

    async def look(self) -> None:
        """See whether what was lacking last is there now."""
        if self._wanted is not None and await self._has(self._wanted):
            self.found()

    async def _has(self, needed: int) -> bool:
        free = await self._files.free_bytes()
        return free is None or free >= needed

    def _needed(self, fingerprint: Fingerprint, tokens: int | None) -> int:
        saved = (
            (one.tokens, one.size_bytes)
            for manifest in self._store.all()
            if manifest.fingerprint == fingerprint
            for one in manifest.generations
        )
        return int(estimated_bytes(tokens, saved) * ROOM_SHARE) + MARGIN_BYTES

    def _tell(self, reason: str, wanted: int | None) -> str:
        was_told = bool(self.lack)
        self.lack, self._wanted = f"{reason}; {ADVICE}", wanted
        if not was_told:
            self._emit(Warned(self.lack, ErrorCode.SAVE_FAILED))
        return self.lack


def _free(free: int) -> str:
    return f"{human(free)} are free where the snapshots lie"


async def _nothing() -> None:
    """Nothing can be let go of."""
