"""The background checkpointer: goes round the slots and saves what is due, flushes all on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvproxy.checkpoint.checkpointer import Checkpointer
from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.checkpoint.policy import CheckpointPolicy, Due, Pressure, is_worth_saving, next_due, save_ahead
from kvproxy.checkpoint.publisher import Checkpoint
from kvproxy.clock import Clock
from kvproxy.identifiers import SessionKey, SlotId
from kvproxy.slots.leases import LeaseDesk
from kvproxy.slots.slot import SlotView
from kvproxy.slots.state import UNDER_WAY, SlotState
from kvproxy.slots.table import SlotTable

ROUND_SECONDS = 1.0
"""How often the clock alone may make a slot due; a slot that comes free is looked at once."""

MOST_REST_SECONDS = 300.0
"""Between two checkpoints of a slot that each time was found to hold too little."""

FLUSH_LOOK_SECONDS = 0.05

LOST_SERVER_SECONDS = 2.0
"""How long a flush waits for a server that is being asked whether it is still the same."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush did: how many conversations were saved, and how many dirty ones could not be."""

    saved: int = 0
    failed: int = 0


Endings = dict[SessionKey, bool]
"""What came of each conversation in the end: True if it was saved."""


Stay = tuple[SlotId, SessionKey | None, int]
"""A revision of a session in a slot."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """A slot is left alone for so many `seconds`, `until` then, or until it holds something else."""

    stay: Stay
    seconds: float
    until: float


class Rounds:
    def __init__(
        self,
        table: SlotTable,
        desk: LeaseDesk,
        checkpointer: Checkpointer,
        policy: CheckpointPolicy,
        save_seconds: Callable[[int | None], float],
        clock: Clock,
        confirm: Callable[[], Awaitable[object]],
    ) -> None:
        """`confirm` asks, where that is not certain, whether the server is the same and awake: a save would
        wake one that sleeps, and find its slots empty."""
        self._table = table
        self._desk = desk
        self._checkpointer = checkpointer
        self._policy = policy
        self._save_seconds = save_seconds
        self._clock = clock
        self._confirm = confirm
        self._changed = asyncio.Event()
        self._resting: dict[SlotId, _Rest] = {}
        """Slots whose last checkpoint came to nothing."""

    def slots_changed(self) -> None:
        """A slot came free and nobody wanted it, or one began to serve. Wakes nobody without a reason:
        this is called twice for each request."""
        if self._next() is not None:
            self._changed.set()

    async def run(self) -> None:
        """Save what is due, for ever."""
        while True:
            await self.run_once()
            try:
                async with asyncio.timeout(ROUND_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()

    async def run_once(self) -> None:
        """One round. What is due is looked up again after each save: a save takes time."""
        while (due := self._next()) is not None:
            stay = _stay(self._table.view(due.slot))
            result = await self.save_slot(due.slot, due.trigger)
            if result.outcome is not CheckpointOutcome.PUBLISHED:
                self._rest(due.slot, stay, result.outcome)

    def _rest(self, slot: SlotId, stay: Stay, outcome: CheckpointOutcome) -> None:
        """A slot that holds less than it should is not likely to hold more a second later."""
        before = self._resting.get(slot)
        is_again = before is not None and before.stay == stay and outcome is CheckpointOutcome.IMPLAUSIBLE
        seconds = min(2 * before.seconds, MOST_REST_SECONDS) if before and is_again else ROUND_SECONDS
        self._resting[slot] = _Rest(stay, seconds, self._clock.now() + seconds)

    def _next(self) -> Due | None:
        views, now = self._table.views(), self._clock.now()
        due = next_due(views, self._policy, now)
        ahead = save_ahead(views, self._policy, Pressure(self._table.last_switch, self._save_seconds), now)
        for one in (*due, ahead) if ahead else due:
            if not self._rests(one.slot, now):
                return one
        return None

    def _rests(self, slot: SlotId, now: float) -> bool:
        rest = self._resting.get(slot)
        return rest is not None and rest.until > now and rest.stay == _stay(self._table.view(slot))

    async def save_slot(self, slot: SlotId, trigger: Trigger) -> Checkpoint:
        """Save one slot if it is free this moment; a save in flight is joined."""
        if (joined := await self._checkpointer.joined(slot)) is not None:
            return joined
        await self._confirm()
        lease = self._desk.try_checkpoint(slot)
        if lease is None:
            return Checkpoint(CheckpointOutcome.BUSY)
        return await self._checkpointer.save_under(lease, trigger)

    async def until_published(self, session: SessionKey) -> None:
        """Wait until nothing of `session` is on its way to the disk."""
        await self._checkpointer.publisher.settled(session)

    async def until_all_published(self) -> None:
        await self._checkpointer.publisher.all_settled()

    async def save_session(self, session: SessionKey, timeout_seconds: float) -> Checkpoint:
        """Save a session where it lives, waiting for its request to end; CLEAN if it lives nowhere."""
        until = self._clock.now() + timeout_seconds
        while (view := self._table.slot_of(session)) is not None and (view.is_dirty or _runs(view)):
            result = await self.save_slot(view.id, Trigger.MANUAL)
            if result.outcome is not CheckpointOutcome.BUSY or self._clock.now() >= until:
                return result
            await asyncio.sleep(FLUSH_LOOK_SECONDS)
        return Checkpoint(CheckpointOutcome.CLEAN)

    async def flush(
        self,
        trigger: Trigger,
        timeout_seconds: float,
        *,
        wait_for_requests: bool,
        endings: Endings | None = None,
    ) -> Flushed:
        """Save every dirty slot within the time. `wait_for_requests`: also those that serve now.

        `endings` are those of a flush before, which this one goes on with: the result tells of both.
        """
        until = self._clock.now() + timeout_seconds
        tried: set[Stay] = set()
        endings = {} if endings is None else endings
        patience = self._clock.now() + LOST_SERVER_SECONDS
        while self._clock.now() < until:
            if self._desk.is_suspended and self._clock.now() >= patience:
                endings.update({v.occupant: False for v in self._table.views() if v.is_dirty and v.occupant})
                break
            views = [v for v in self._table.views() if v.is_dirty or (wait_for_requests and _runs(v))]
            ready = [v for v in views if _stay(v) not in tried]
            free = [v for v in ready if _can_be_saved(v)]
            for view in free:
                result = await self._save_until(until, view.id, trigger)
                if result.outcome is CheckpointOutcome.BUSY:
                    continue
                tried.add(_stay(view))
                _note(endings, view.occupant, result.outcome)
            is_coming = wait_for_requests and (bool(ready) or self._desk.floats)
            if not is_coming and not (ready and free):
                break
            await asyncio.sleep(FLUSH_LOOK_SECONDS)
        return _count(endings)

    async def _save_until(self, until: float, slot: SlotId, trigger: Trigger) -> Checkpoint:
        """Save one slot; TIMED_OUT if that is not over by `until`. The save itself goes on."""
        try:
            async with asyncio.timeout(max(0.0, until - self._clock.now())):
                return await self.save_slot(slot, trigger)
        except TimeoutError:
            return Checkpoint(CheckpointOutcome.TIMED_OUT)

    def reckon(self, endings: Endings) -> Flushed:
        """What came of all in the end: work in a slot that nobody will save is lost."""
        final = dict(endings)
        for view in self._table.views():
            if view.occupant is None or not self._checkpointer.may_save(view.occupant):
                continue
            if _runs(view) or self._is_unsaved(view):
                final[view.occupant] = False
            elif view.occupant in final and not view.is_dirty:
                final[view.occupant] = True  # by a save that ended after the flush had given it up
        return _count(final)

    def _is_unsaved(self, view: SlotView) -> bool:
        tokens = view.occupancy.tokens if view.occupancy else None
        return view.is_dirty and is_worth_saving(tokens, self._policy)


def _count(endings: Endings) -> Flushed:
    saved = sum(endings.values())
    return Flushed(saved, len(endings) - saved)


def _runs(view: SlotView) -> bool:
    """Whether a request of its occupant is in it, whose work will be dirty once it has ended."""
    return view.occupant is not None and view.state in UNDER_WAY


def _can_be_saved(view: SlotView) -> bool:
    """Now, or is being saved, which is joined."""
    is_free = view.state is SlotState.RESIDENT and not view.is_leased
    return is_free or view.state is SlotState.SAVING


def _note(endings: Endings, session: SessionKey | None, outcome: CheckpointOutcome) -> None:
    if session is None:
        return
    if outcome is CheckpointOutcome.PUBLISHED:
        endings[session] = True
    elif outcome.loses_work:
        endings[session] = False


def _stay(view: SlotView) -> Stay:
    return view.id, view.occupant, view.occupancy.revision if view.occupancy else 0
