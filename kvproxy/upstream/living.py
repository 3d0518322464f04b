"""Keeps the record of living slots (see `slots.living`), and takes up what it proves after a start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kvproxy.clock import Clock
from kvproxy.identifiers import ServerName, SlotId
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.slots.leases import LeaseDesk
from kvproxy.slots.living import Living, LivingSlot, decode, encode, living_slot, proven, wants_look
from kvproxy.slots.slot import SlotView
from kvproxy.slots.table import SlotTable
from kvproxy.snapshots.atomic import write_atomic
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.facts import ServerState, Standing
from kvproxy.upstream.replies import Props, SlotInfo, Unavailable

PERIOD_SECONDS = 1.0
REST_SECONDS = 10.0
"""After a look that the server did not answer: it has a batch to compute, and each question waits in line."""
MAX_BYTES = 1 << 20


class LivingSlots:
    """The record of one server's living slots, at `path`. `ask` finds out anew who the server is; `on_look`
    is told what each look showed and when, in the clock's seconds, it began."""

    def __init__(
        self,
        path: Path,
        server: ServerName,
        client: LlamaServer,
        standing: Standing,
        table: SlotTable,
        desk: LeaseDesk,
        registry: SessionRegistry,
        clock: Clock,
        ask: Callable[[], Awaitable[None]],
        on_look: Callable[[Sequence[SlotInfo], float], None],
    ) -> None:
        self._path = path
        self._server = server
        self._client = client
        self._standing = standing
        self._table = table
        self._desk = desk
        self._registry = registry
        self._clock = clock
        self._ask = ask
        self._on_look = on_look
        self._before: Living | None = None
        """What the kvproxy before left, until it was compared with what is there."""
        self._on_disk: Living | None = None
        self._writing = asyncio.Lock()
        self._rests_until = float("-inf")

    async def load(self) -> None:
        """Read what the kvproxy before has left."""
        data = await asyncio.to_thread(_read, self._path)
        self._before = self._on_disk = None if data is None else decode(data)

    def readopt(self, props: Props, infos: Sequence[SlotInfo]) -> None:
        """Take up what lives, at the first look at the slots of this kvproxy's life."""
        before, self._before = self._before, None
        if before is None:
            return
        for one in proven(before, self._server, props, infos):
            if self._table.readopt(one.slot, self._table.epoch, one.occupancy(self._clock.now())):
                self._remember(one)

    async def run(self) -> None:
        """Look and write, at most once a second, for ever."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.keep()

    async def keep(self) -> None:
        await self._look()
        await self.write()

    async def write(self) -> None:
        """Write down what is known now, if it is not what stands there."""
        async with self._writing:
            living = self._living()
            if living is None or living == self._on_disk:
                return
            self._on_disk = living if await asyncio.to_thread(_write, self._path, encode(living)) else None

    async def forget(self, slot: SlotId) -> None:
        """Before something is put into `slot` without a task of the server's telling of it."""
        async with self._writing:
            if self._on_disk is not None and any(one.slot == slot for one in self._on_disk.slots):
                await asyncio.to_thread(_remove, self._path)
                self._on_disk = None

    # -- inside ------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        if not self._may_look():
            return
        await self._ask()
        if not self._is_awake or not self._may_look():
            return
        epoch, began = self._table.epoch, self._clock.now()
        infos = await self._client.slots()
        if isinstance(infos, Unavailable):
            self._rests_until = self._clock.now() + REST_SECONDS
        elif epoch == self._table.epoch:
            self._on_look(infos, began)
            if self._table.seen(infos, began):
                self._desk.changed()

    @property
    def _is_awake(self) -> bool:
        """A look would wake a server that has fallen asleep."""
        return self._standing.facts.state in (ServerState.HEALTHY, ServerState.DEGRADED)

    def _may_look(self) -> bool:
        """Not while the server is to find out that a client has left: each answer makes it wait longer."""
        is_due = self._clock.now() >= self._rests_until and not self._table.unsettled
        return is_due and wants_look(self._table.views())

    def _living(self) -> Living | None:
        """None as long as it is not known whether what stands there still holds."""
        props = self._standing.facts.props
        if props is None or not props.has_marker or self._before is not None:
            return None
        slots = tuple(one for view in self._table.views() if (one := self._slot(view)) is not None)
        return Living(server=self._server, marker=props.marker, slots=slots)

    def _slot(self, view: SlotView) -> LivingSlot | None:
        session = None if view.occupant is None else self._registry.find(view.occupant)
        if session is None or not session.may_persist:
            return None
        return living_slot(view, session.client_digest, session.model)

    def _remember(self, one: LivingSlot) -> None:
        session = self._registry.find(one.session) or self._registry.adopt(
            one.session, one.client_digest, one.model, self._clock.wall(), one.revision
        )
        session.revision = max(session.revision, one.revision)
        session.was_resident = True


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError:
        # There is none, or it is of no use: then nothing is taken up.
        return None


def _write(path: Path, data: bytes) -> bool:
    try:
        write_atomic(path, data)
    except OSError:
        # A record that cannot be written must not stay behind as an old one that is believed.
        _remove(path)
        return False
    return True


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # Then it cannot be replaced either: it stays, and tells of tasks that are long past.
        return
