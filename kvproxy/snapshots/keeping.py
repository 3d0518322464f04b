"""Keeps the snapshots within their bounds, in the background: quota, count, age, and files nobody names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvproxy.clock import Clock
from kvproxy.identifiers import SnapshotName
from kvproxy.snapshots.files import SnapshotFiles
from kvproxy.snapshots.retention import choose_expired
from kvproxy.snapshots.store import SnapshotStore
from kvproxy.telemetry.events import Emit, Warned

ROUND_SECONDS = 600.0
SECONDS_PER_DAY = 86_400


class Bounds(Protocol):
    """The `retention` section."""

    @property
    def max_total_bytes(self) -> int: ...
    @property
    def max_snapshots(self) -> int: ...
    @property
    def max_age_days(self) -> float | None: ...


class Keeper:
    """`in_flight` are the names of saves under way: they have no manifest yet and are no orphans."""

    def __init__(
        self,
        store: SnapshotStore,
        files: SnapshotFiles,
        bounds: Bounds,
        clock: Clock,
        emit: Emit,
        in_flight: Callable[[], set[SnapshotName]],
    ) -> None:
        self._store = store
        self._files = files
        self._bounds = bounds
        self._clock = clock
        self._emit = emit
        self._in_flight = in_flight
        self._wanted = asyncio.Event()
        self._told = False

    def look(self) -> None:
        """Something was published: see whether something must go."""
        self._wanted.set()

    async def run(self) -> None:
        """Look when asked, and now and then, for ever; first of all at what the last life left behind."""
        await self.sweep()
        while True:
            await self.collect()
            try:
                async with asyncio.timeout(ROUND_SECONDS):
                    await self._wanted.wait()
            except TimeoutError:
                await self.sweep()
            self._wanted.clear()

    async def collect(self, *, dry_run: bool = False) -> tuple[SnapshotName, ...]:
        """Let go of what is beyond the bounds; the names that went, or in a dry run would have."""
        age = self._bounds.max_age_days
        expired = choose_expired(
            self._store.all(),
            max_total_bytes=self._bounds.max_total_bytes,
            max_snapshots=self._bounds.max_snapshots,
            max_age_seconds=None if age is None else age * SECONDS_PER_DAY,
            now=self._clock.wall(),
            in_use=self._store.restoring(),
        )
        if dry_run or not expired:
            return tuple(one.name for one in expired)
        removed = await self._store.forget({one.name for one in expired})
        await self.delete(removed.names)
        return removed.names

    async def sweep(self, *, dry_run: bool = False) -> tuple[SnapshotName, ...]:
        """Delete files of ours that no manifest names: what a kill left behind. The names that went, or in
        a dry run would have."""
        if not self._store.is_open:
            return ()  # whose files are ours is not known
        orphans = await self._files.orphans(self._known(), self._store.owner)
        if dry_run:
            return orphans
        return tuple([name for name in orphans if await self._swept(name)])

    async def _swept(self, name: SnapshotName) -> bool:
        # Asked for each: a save may have begun after the first look, and be published during the last.
        return name not in self._known() and await self._files.delete(name)

    def _known(self) -> set[SnapshotName]:
        return self._store.names() | self._in_flight()

    async def delete(self, names: tuple[SnapshotName, ...]) -> None:
        """Delete the files of forgotten snapshots, where we can reach them."""
        for name in names:
            await self._files.delete(name)
        if names and not self._files.is_visible and not self._told:
            self._told = True
            self._emit(
                Warned(
                    "snapshots were forgotten, but their files lie in the server's save directory, which "
                    "kvproxy cannot see: set upstreams[].snapshot_dir, or delete old kvp-*.kv files yourself"
                )
            )
