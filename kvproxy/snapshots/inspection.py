"""Looks now and then whether what is kept is still there: the two directories, and each snapshot's file.

At sight alone, nothing is read. A directory that cannot be used says nothing of the snapshots in it, and
neither does one in whose place another file system is mounted: they are good again once it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvproxy.errors import ErrorCode
from kvproxy.identifiers import SessionKey
from kvproxy.snapshots.files import SnapshotFiles
from kvproxy.snapshots.store import SnapshotStore
from kvproxy.telemetry.events import Emit, Warned

ROUND_SECONDS = 15.0

BACK = "the directories can be used again: conversations are saved and restored"


class Inspection:
    """`open_state` opens the state directory and says why it cannot, or nothing. `on_obstacle` is told why
    nothing can be kept, each time that changes; nothing where there is no such reason any more.
    `look_for_room` sees whether there is room again on a disk that was full. `on_gone` is told whose newest
    snapshot is not what was saved any more."""

    def __init__(
        self,
        store: SnapshotStore,
        files: SnapshotFiles,
        emit: Emit,
        *,
        open_state: Callable[[], Awaitable[str]],
        on_obstacle: Callable[[str], Awaitable[None]],
        look_for_room: Callable[[], Awaitable[None]],
        on_gone: Callable[[SessionKey], None],
    ) -> None:
        self._store = store
        self._files = files
        self._emit = emit
        self._open_state = open_state
        self._on_obstacle = on_obstacle
        self._look_for_room = look_for_room
        self._on_gone = on_gone
        self._obstacle = ""

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            await asyncio.sleep(ROUND_SECONDS)
            await self.run_once()

    async def run_once(self) -> None:
        is_open = self._store.is_open
        fault = await self._store.why_unusable() if is_open else await self._open_state()
        manifests = self._store.all()
        valid = [one for manifest in manifests for one in manifest.generations if one.is_valid]
        sight = await self._files.at_sight(valid)
        if not fault and sight.fault:
            fault = f"snapshot_dir cannot be used: {sight.fault}"
        await self._tell(fault)
        await self._look_for_room()
        for manifest in manifests if sight.wrong else ():
            for one in manifest.generations:
                if (reason := sight.wrong.get(one.name)) is not None:
                    if one is manifest.current:
                        self._on_gone(manifest.key)
                    await self._store.invalidate(manifest.key, manifest.fingerprint, one.name, reason)

    async def _tell(self, obstacle: str) -> None:
        if obstacle == self._obstacle:
            return
        self._obstacle = obstacle
        said = f"nothing is saved or restored: {obstacle}" if obstacle else BACK
        self._emit(Warned(said, ErrorCode.METADATA_IO if obstacle else ""))
        await self._on_obstacle(obstacle)
