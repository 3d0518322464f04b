"""The lease desk: who waits, and who holds which slots.

A lease is the exclusive right to one or more slots until it is released, once. The slot is chosen at the
moment of granting, in one synchronous pass over the waiting line (`_pump`), so no choice is ever stale;
and a grant counts only when the waiter takes it: one that left in between gives it back.

Three shapes of lease serve requests:
 PINNED     one slot, named in the request.
 FLOATING   the server picks among the slots it believes idle, so all that are free are held, no other may
            have something on its way that the server does not know of, and nothing at all is granted until
            it was seen which one it took (`narrow`): a pinned request that met it in a slot would mix two
            conversations in one answer.
 EXCLUSIVE  the request may use several slots: all of them, from beginning to end.
CHECKPOINT leases are taken without waiting: a save never queues behind users, nor they behind a line of it.
Where the server clears idle slots whenever it launches a request, there is one more rule: nothing is granted
while anything of ours is on its way, so that what was restored is still there when its request is launched,
and what was answered is saved before another launch clears it.

The line is first come, first served, with two refinements: a waiter that can only be served by one slot
(its own session's) does not hold up the others, while one that needs many does, or it would starve. So does
one for which there is no room yet in a memory that the slots share (`cells`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from kvproxy.clock import Clock
from kvproxy.errors import CapacityError, ErrorCode, InvariantError, NotPinned, ReplyError
from kvproxy.identifiers import Epoch, SessionKey, SlotId
from kvproxy.slots.cells import may_run
from kvproxy.slots.lease import Lease
from kvproxy.slots.slot import SlotView
from kvproxy.slots.state import UNDER_WAY, SlotState
from kvproxy.slots.table import SlotTable
from kvproxy.slots.want import Purpose, Want, any_in_hand, choose, unused

__all__ = ["Lease", "LeaseDesk", "Purpose", "Want"]


@dataclass(slots=True, eq=False)
class _Waiter:
    want: Want
    granted: asyncio.Future[Lease]
    since: float


class LeaseDesk:
    """Grants leases on the slots of one table.

    `max_waiting` bounds the line (0: at once or not at all), `max_wait_seconds` the wait in it. `on_change`
    is called when slots came free or began to serve, after the line was served: what is free then, nobody
    wants. `on_unseen` is called when the line waits for requests to be seen running. The last `set_apart`
    slots are kept for requests that own nothing.
    """

    def __init__(
        self,
        table: SlotTable,
        clock: Clock,
        *,
        max_waiting: int,
        max_wait_seconds: float,
        on_change: Callable[[], None],
        on_unseen: Callable[[], None] = lambda: None,
        set_apart: int = 0,
    ) -> None:
        self.table, self.set_apart = table, set_apart
        self._clock = clock
        self._max_waiting = max_waiting
        self._max_wait_seconds = max_wait_seconds
        self._on_change = on_change
        self._on_unseen = on_unseen
        self._opened = asyncio.Event()
        self._moved = asyncio.Event()
        self._line: deque[_Waiter] = deque()
        self._ids = count(1)
        self._gate: Lease | None = None
        self._strays = 0
        self._suspended = True
        self._out: dict[int, Lease] = {}
        self._returned = asyncio.Event()

    # -- asking ------------------------------------------------------------------------------------------

    async def acquire(self, want: Want, on_wait: Callable[[], None] = lambda: None) -> Lease:
        """A lease; `on_wait` is called if that takes a wait. Raises CapacityError (line full, waited too
        long), NotPinned, or what `refuse` was given."""
        if 0 < self._max_waiting <= len(self._line):
            raise _line_full()
        if not self._line and (lease := self._granted(want, 0.0)) is not None:
            return lease
        waiter = _Waiter(want, asyncio.get_running_loop().create_future(), self._clock.now())
        self._line.append(waiter)
        self._pump()
        if waiter.granted.done():
            return waiter.granted.result()
        if not self._max_waiting:
            self._line.remove(waiter)
            raise _line_full()
        on_wait()
        return await self._wait(waiter)

    async def _wait(self, waiter: _Waiter) -> Lease:
        try:
            async with asyncio.timeout(self._max_wait_seconds):
                return await waiter.granted
        except TimeoutError:
            self._leave(waiter)
            waited = f"no slot came free within {self._max_wait_seconds:g} s"
            message = f"{waited}: try again, or raise queue.max_wait_seconds"
            raise CapacityError(ErrorCode.QUEUE_TIMEOUT, message) from None
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _leave(self, waiter: _Waiter) -> None:
        """The waiter is gone; a lease it was handed in the same moment goes back."""
        granted = waiter.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            granted.result().release()
            return
        granted.cancel()
        if waiter in self._line:
            self._line.remove(waiter)
        self._pump()

    def try_checkpoint(self, slot: SlotId) -> Lease | None:
        """A lease to save `slot`, if it is resident and free this moment and nobody waits for it."""
        # Who asks may have chosen the slot before a save that took a while, and in another life.
        view = next((view for view in self.table.views() if view.id == slot), None)
        if self._is_closed or view is None or not view.is_free or view.occupancy is None:
            return None
        return self._lease(Want(Purpose.CHECKPOINT, view.occupant), (slot,), 0.0)

    def try_unused(self) -> Lease | None:
        """A lease of a slot that nobody lives in, if nothing is under way and nobody waits."""
        slot = None if self._is_closed or self._line else unused(self.table.views())
        return None if slot is None else self._lease(Want(Purpose.CHECKPOINT), (slot,), 0.0)

    # -- the server's states -----------------------------------------------------------------------------

    def suspend(self) -> None:
        """Grant nothing until `resume`: whether the server is still the same is being found out."""
        self._suspended = True

    def resume(self) -> None:
        self._suspended = False
        self._pump()

    def stop_pinning(self) -> None:
        """Grant nothing more; whoever waits is told to go on without a slot."""
        self._suspended = True
        self.refuse(NotPinned("requests are no longer pinned"))

    async def until_all_returned(self) -> None:
        """Wait until no lease of this epoch is out. Only sensible while nothing is granted."""
        while self._out:
            await self._returned.wait()
            self._returned.clear()

    def refuse(self, error: ReplyError | NotPinned) -> None:
        """Send everybody in the line away with `error`."""
        waiters, self._line = self._line, deque()
        for waiter in waiters:
            if not waiter.granted.done():
                waiter.granted.set_exception(error)

    def epoch_began(self) -> None:
        """The leases of before are void; with them goes a gate one of them had closed."""
        self._gate = None
        self._opened.set()
        self._moved.set()
        self._out.clear()
        self._returned.set()

    def stray_began(self) -> None:
        """A request is on its way without a lease, to a server that was not ready for one."""
        self._strays += 1

    @property
    def has_strays(self) -> bool:
        return self._strays > 0

    def stray_ended(self) -> None:
        self._strays -= 1
        self._pump()

    # -- holding -----------------------------------------------------------------------------------------

    def narrow(self, lease: Lease, slots: tuple[SlotId, ...]) -> None:
        if lease.is_released or lease.is_void:
            return
        self.table.let_go([s for s in lease.slots if s not in slots], lease.id)
        lease.slots = tuple(s for s in lease.slots if s in slots)
        self._open_gate(lease)
        self._served()

    def widen(self, lease: Lease) -> tuple[SlotId, ...]:
        """Hold for a floating `lease` what came free since it was granted; these slots."""
        if lease.is_released or lease.is_void:
            return ()
        fresh = tuple(view.id for view in self.table.views() if view.is_free)
        self.table.hold(fresh, lease.id, lease.want.cells, lease.want.worst)
        lease.slots += fresh
        return fresh

    def claim(self, lease: Lease, slot: SlotId) -> bool:
        """Whether `lease` holds `slot`, in which its request was found: it may have come free only after
        that was sent. False if somebody else has it still."""
        if lease.is_released or lease.is_void:
            return False
        if slot not in lease.slots and not self.table.view(slot).is_leased:
            self.table.hold((slot,), lease.id, lease.want.cells, lease.want.worst)
            lease.slots += (slot,)
        return slot in lease.slots

    def borrow(self, lease: Lease, slot: SlotId | None = None) -> Lease | None:
        """A lease of all free slots, or of `slot`, for the holder of `lease`, to whom the server has no room
        to give; None if there is none."""
        free = tuple(view.id for view in self.table.views() if view.is_free and slot in (None, view.id))
        return self._lease(Want(Purpose.CHECKPOINT), free, 0.0) if free and not lease.is_void else None

    async def depart(self, lease: Lease, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until the request of `lease` may be sent: with the next step of the caller it is.

        A request that the server puts where it likes, or by which it clears slots, must not meet the end of
        another: what that left has to be saved first, so who had departed before has not any more.
        """
        lease.has_departed = False
        self._opened.set()
        while self._must_be_alone(lease) and any_in_hand(self._others(lease)):
            on_wait()
            self._moved.clear()
            await self._moved.wait()
        lease.has_departed = True

    def _must_be_alone(self, lease: Lease) -> bool:
        return (lease.want.purpose is Purpose.FLOATING or self.table.is_volatile) and not lease.is_void

    def _others(self, lease: Lease) -> list[SlotView]:
        return [view for view in self.table.views() if view.id not in lease.slots]

    async def until_located(self) -> None:
        """Wait until it is known of every floating request that was sent which slot it took."""
        while self._gate is not None and self._gate.has_departed:
            self._opened.clear()
            await self._opened.wait()

    def launched(self, lease: Lease) -> None:
        """The answer to the request of a pinned `lease` has begun."""
        if self.table.launched(lease.slot, lease.epoch):
            self._moved.set()
            if self._line:
                self._pump()

    def release(self, lease: Lease) -> None:
        """Give everything back. Twice is a bug; of a passed epoch there is nothing to give."""
        if lease.is_released:
            raise InvariantError(f"lease {lease.id} was released before")
        lease.is_released = True
        if not lease.is_void:
            self.table.let_go(lease.slots, lease.id)
            self._out.pop(lease.id, None)
            self._returned.set()
        self._open_gate(lease)
        self._served()

    def changed(self) -> None:
        """Slots came free without a lease ending: seen idle, or the fate of an action known."""
        self._served()

    def reconsider(self) -> None:
        """A slot began to serve: another request of its session may go elsewhere now, and, where slots change
        hands, another slot may be the next to do so."""
        if self._line:
            self._pump()
        if self.table.last_switch is not None:
            self._on_change()

    @property
    def epoch(self) -> Epoch:
        return self.table.epoch

    @property
    def is_suspended(self) -> bool:
        return self._suspended

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def floats(self) -> bool:
        """Whether a lease is out whose slot the server chose: what its request leaves is not noted yet."""
        return any(lease.want.purpose is Purpose.FLOATING for lease in self._out.values())

    @property
    def out(self) -> int:
        """How many leases of this epoch are out."""
        return len(self._out)

    # -- granting: no await below this line ----------------------------------------------------------------

    @property
    def _is_closed(self) -> bool:
        is_shut = self._suspended or self._gate is not None or self._strays > 0
        return is_shut or (self.table.is_volatile and any_in_hand(self.table.views()))

    def _served(self) -> None:
        self._moved.set()
        if self._line:
            self._pump()
        self._on_change()

    def _open_gate(self, lease: Lease) -> None:
        if self._gate is lease:
            self._gate = None
            self._opened.set()

    @property
    def awaits_launch(self) -> bool:
        """Whether somebody could be served, were it seen that the requests of others run."""
        is_serial = self.table.is_volatile and bool(self._line)
        floats = any(waiter.want.purpose is Purpose.FLOATING for waiter in self._line)
        return (is_serial or floats) and any(
            view.state is SlotState.SERVING and not view.is_underway for view in self.table.views()
        )

    def _pump(self) -> None:
        """Serve the line, first come first."""
        still: deque[_Waiter] = deque()
        line, self._line = self._line, deque()
        blocked = False
        for waiter in line:
            if waiter.granted.done():
                continue
            if blocked or not self._grant(waiter):
                still.append(waiter)
                blocked = blocked or self._holds_up(waiter.want)
        self._line.extendleft(reversed(still))
        if self.awaits_launch:
            self._on_unseen()

    def _holds_up(self, want: Want) -> bool:
        """Whether those behind it have to wait because it does."""
        if want.purpose in (Purpose.FLOATING, Purpose.EXCLUSIVE):
            return True
        return self.table.pool is not None and self._choose(want) is not None

    def _arriving(self) -> list[SessionKey]:
        """Of leases whose request was not sent yet. A fork's session is none of theirs."""
        pinned = (out for out in self._out.values() if out.want.purpose is Purpose.PINNED and not out.is_fork)
        found = ((out.want.session, self.table.view(out.slot)) for out in pinned)
        return [who for who, view in found if who and view.occupant != who and view.state not in UNDER_WAY]

    def _choose(self, want: Want) -> tuple[tuple[SlotId, ...], bool] | None:
        return choose(want, self.table.views(), self._arriving() if self._out else (), self.set_apart)

    def _grant(self, waiter: _Waiter) -> bool:
        lease = self._granted(waiter.want, self._clock.now() - waiter.since)
        if lease is None:
            return False
        waiter.granted.set_result(lease)
        return True

    def _granted(self, want: Want, waited: float) -> Lease | None:
        """The lease that `want` gets this moment, if any."""
        if self._is_closed:
            return None
        choice, pool = self._choose(want), self.table.pool
        if choice is None:
            return None
        slots, is_fork = choice
        if pool is not None and not may_run(pool, want.cells, slots, self.table.views()):
            return None
        lease = self._lease(want, slots, waited, is_fork)
        if want.purpose is Purpose.FLOATING:
            self._gate = lease
        return lease

    def _lease(self, want: Want, slots: tuple[SlotId, ...], waited: float, is_fork: bool = False) -> Lease:
        lease = Lease(next(self._ids), want, slots, self.table.epoch, is_fork, waited, self)
        self.table.hold(slots, lease.id, want.cells, want.worst)
        self._out[lease.id] = lease
        return lease

    def __repr__(self) -> str:
        gate = " gate closed" if self._gate else ""
        halt = " suspended" if self._suspended else ""
        return f"<LeaseDesk {len(self._out)} out, {len(self._line)} waiting{gate}{halt} {self.table!r}>"


def _line_full() -> CapacityError:
    message = "too many requests wait for a slot: try again, or raise queue.max_waiting"
    return CapacityError(ErrorCode.QUEUE_FULL, message, status=429)
