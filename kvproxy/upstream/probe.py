"""Looks at `GET /slots` where only looking tells: is a dropped request over, and which slot did an unpinned
one take. Never looks without a reason, and rarely: every answer of the server restarts the second of
quiet after which it notices that a client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvproxy.clock import Clock
from kvproxy.identifiers import SlotId
from kvproxy.slots.leases import Lease, LeaseDesk, Purpose
from kvproxy.slots.settling import Settling
from kvproxy.slots.slot import Occupancy
from kvproxy.slots.state import SlotState
from kvproxy.slots.table import SlotTable
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.facts import Standing
from kvproxy.upstream.replies import SlotInfo, Unavailable

FIRST_LOOK_SECONDS = 0.1
"""A dropped answer that was being generated is over in 50 ms."""

QUIET_LOOK_SECONDS = 1.25
"""Longer than the server's second of quiet."""

LAUNCH_LOOK_SECONDS = 0.05
"""Somebody waits for it."""

LOCATE_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)


@dataclass(slots=True)
class Flight:
    """An unpinned request under way. The exchange says how it ended, and `follow` acts on it."""

    lease: Lease
    before: Mapping[SlotId, int | None]
    """The last task of each slot before the request was sent."""
    body_bytes: int
    ended: asyncio.Event
    leaves_no_trace: bool = False
    """It may change slots without running in them: then it was in all that are held."""
    was_dropped: bool = False
    taken: tuple[SlotId, ...] = ()
    stay: Occupancy | None = None
    """The session's whose request it is: it adopts the slot, if it took one alone. None if it is nobody's."""
    expected: SlotId | None = None
    """The slot it should be found in, where that stay is; None if that is the server's to say."""
    was_refused: bool = False
    """Nothing was computed: the slot it was refused in is as it was."""
    left: Occupancy | None = None
    """What of that stay the answer left in the slot; None if nothing that can be believed."""
    tokens: int | None = None
    """How many tokens the answer left in the slot, whosever they are; None if not known."""
    done: Callable[[], None] = lambda: None
    """To be called once it is known where it ran."""

    def end(
        self,
        *,
        was_dropped: bool,
        was_refused: bool = False,
        left: Occupancy | None = None,
        tokens: int | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        self.was_dropped, self.was_refused, self.left, self.tokens = was_dropped, was_refused, left, tokens
        self.done = done or self.done
        self.ended.set()

    def left_in(self, slot: SlotId) -> Occupancy | None:
        """What of the session is in `slot`, the one that was taken."""
        if self.was_refused:
            return self.stay if slot == self.expected else None
        return self.left

    @property
    def adopts(self) -> bool:
        return self.stay is not None and len(self.taken) == 1


class Probe:
    """The looks at the slots of one server, made one after the other."""

    def __init__(
        self,
        client: LlamaServer,
        table: SlotTable,
        desk: LeaseDesk,
        standing: Standing,
        clock: Clock,
        *,
        on_foreign: Callable[[tuple[SlotId, ...]], None],
        on_look: Callable[[Sequence[SlotInfo], float], None],
    ) -> None:
        self._client = client
        self._table = table
        self._desk = desk
        self._standing = standing
        self._clock = clock
        self._on_foreign = on_foreign
        self._on_look = on_look
        self._wanted = asyncio.Event()
        self._is_glance_due = False

    # -- slots to be seen idle -------------------------------------------------------------------------------

    def want(self) -> None:
        """A slot waits to be seen idle, or its request to be seen running."""
        self._wanted.set()

    def glance(self) -> None:
        """What idle slots hold may have changed: one look, soon."""
        self._is_glance_due = True
        self._wanted.set()

    async def run(self) -> None:
        """Look as long as something waits to be seen, for ever."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._is_glance_due:
                await self.look_once()
            await self._rest(FIRST_LOOK_SECONDS)
            while self._table.unsettled or self._desk.awaits_launch:
                await self.look_once()
                await self._rest(QUIET_LOOK_SECONDS)

    async def _rest(self, seconds: float) -> None:
        if self._desk.awaits_launch:
            await asyncio.sleep(LAUNCH_LOOK_SECONDS)
        elif self._table.unsettled:
            await self._pause(seconds)

    async def look_once(self) -> None:
        """Take in what the slots show now; nothing if the server does not answer."""
        self._is_glance_due = False
        epoch, began = self._table.epoch, self._clock.now()
        infos = await self._client.slots()
        if isinstance(infos, Unavailable) or epoch != self._table.epoch:
            return
        self._on_look(infos, began)
        if self._table.seen(infos, began):
            self._desk.changed()
        self.look_for_foreign(infos, began)

    def look_for_foreign(self, infos: Sequence[SlotInfo], asked_at: float) -> None:
        """Whether a look that was made anyway shows slots that somebody else used."""
        if not self._standing.facts.pins:
            return  # Our own requests run where the server puts them.
        if used := self._table.foreign(infos, asked_at):
            self._on_foreign(used)
            self._wanted.set()

    async def _pause(self, seconds: float) -> None:
        """Rest, but not past the moment when another slot is to be looked at."""
        try:
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        except TimeoutError:
            return
        self._wanted.clear()
        await asyncio.sleep(FIRST_LOOK_SECONDS)

    # -- unpinned requests -----------------------------------------------------------------------------------

    async def before_flight(self, lease: Lease, body_bytes: int, *, leaves_no_trace: bool) -> Flight:
        """What the slots ran last, to see later which of them the request took."""
        infos = await self._client.slots()
        tasks = {} if isinstance(infos, Unavailable) else {i.id: i.id_task for i in infos}
        return Flight(lease, tasks, body_bytes, asyncio.Event(), leaves_no_trace)

    async def follow(self, flight: Flight) -> None:
        """See an unpinned request through to its end: find its slots, and let the others go. Who calls holds
        the lease, and gives it back."""
        if flight.lease.want.purpose is Purpose.FLOATING:
            await self._locate(flight)
        await flight.ended.wait()
        if not flight.taken and not await self._look_for(flight):
            # Nobody can say where it ran: in any of them.
            self._take(flight, flight.lease.slots)
        self._conclude(flight)

    async def _locate(self, flight: Flight) -> None:
        delays = iter(LOCATE_SECONDS)
        while not flight.taken and not flight.ended.is_set():
            try:
                async with asyncio.timeout(next(delays, LOCATE_SECONDS[-1])):
                    await flight.ended.wait()
            except TimeoutError:
                await self._look_for(flight)
                if flight.taken:
                    # Also where nothing is let go by it: the others wait for the gate.
                    flight.lease.narrow(flight.taken)

    async def _look_for(self, flight: Flight) -> bool:
        """Look for the slots it took; False if the server did not let us look."""
        began = self._clock.now()
        infos = await self._client.slots()
        if isinstance(infos, Unavailable) or not flight.before or flight.leaves_no_trace:
            return False
        if flight.lease.is_void:
            return True
        self._take(flight, tuple(info.id for info in infos if self._was_taken(info, flight)))
        self.look_for_foreign(infos, began)
        return True

    def _was_taken(self, info: SlotInfo, flight: Flight) -> bool:
        ran_since = info.id_task != flight.before.get(info.id, info.id_task)
        if info.id in flight.lease.slots:
            return info.is_processing or ran_since
        # A pinned request that ran there ended before this one was launched, and nothing was granted since.
        return ran_since and self._table.view(info.id).state in (SlotState.IDLE, SlotState.RESIDENT)

    def _take(self, flight: Flight, slots: tuple[SlotId, ...]) -> None:
        flight.taken = slots
        for slot in slots:
            self._table.take(slot, flight.lease.epoch, flight.stay if flight.adopts else None)

    def _conclude(self, flight: Flight) -> None:
        epoch = flight.lease.epoch
        if flight.was_dropped and not flight.taken:
            # It may still be launched, in any of the held slots.
            for slot in flight.lease.slots:
                self._table.take(slot, epoch)
                self._table.broke_off(
                    slot, epoch, Settling(slot, was_seen=False, body_bytes=flight.body_bytes)
                )
            return
        for slot in flight.taken:
            if flight.was_dropped:
                self._table.broke_off(slot, epoch, Settling(slot, was_seen=True))
            else:
                is_held = flight.adopts and self._desk.claim(flight.lease, slot)
                self._table.served(slot, epoch, flight.left_in(slot) if is_held else None, flight.tokens)
