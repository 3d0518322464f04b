"""The slot table: the only writer of what we believe of a server's slots.

Every method is synchronous and touches nothing else, so each is atomic among the tasks of one loop. Those
that act for a lease say so by taking it; once its epoch has passed they change nothing and answer False,
because what the holder learned is about a process that is gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvproxy.clock import Clock
from kvproxy.errors import InvariantError
from kvproxy.identifiers import Epoch, Revision, SessionKey, SlotId
from kvproxy.slots.settling import Settling, look
from kvproxy.slots.slot import Occupancy, SlotView
from kvproxy.slots.state import SlotEvent, SlotState, advance
from kvproxy.upstream.replies import SlotInfo


@dataclass(frozen=True, slots=True)
class SeenTask:
    """`id` is None for a slot that never ran a task."""

    id: int | None


@dataclass(slots=True)
class _Slot:
    id: SlotId
    last_used: float
    state: SlotState = SlotState.UNKNOWN
    occupancy: Occupancy | None = None
    holder: int | None = None
    """The id of the lease that is out on it."""
    is_blank: bool = False
    pending_actions: int = 0
    """Slot actions past their deadline whose fate is open."""
    met_doubt: bool = False
    """Its request was sent while an action's fate was open: which of the two came last, nobody can say."""
    settling: Settling | None = None
    was_seen_running: bool = False
    """The request it serves."""
    since: float = -math.inf
    """When that request was sent, or dropped."""
    free_since: float = -math.inf
    """When the last lease on it was given back."""
    last_task: SeenTask | None = None
    """What it was seen to have run last, since then."""

    def view(self) -> SlotView:
        leased = self.holder is not None
        return SlotView(
            self.id, self.state, self.occupancy, leased, self.last_used, self.is_blank, self._is_underway
        )

    @property
    def _is_underway(self) -> bool:
        if self.settling is not None:
            return self.settling.was_seen
        return self.state is SlotState.SERVING and self.was_seen_running


class SlotTable:
    """What we believe of the slots of one server in its present epoch."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots: dict[SlotId, _Slot] = {}
        self.epoch = Epoch(0)
        self.last_switch: float | None = None
        """Monotonic seconds at which somebody last had to leave a slot."""

    # -- a life of the server --------------------------------------------------------------------------

    def begin_epoch(self, total_slots: int) -> Epoch:
        """Forget everything: `total_slots` slots of which nothing is known. Leases of before are void."""
        self.epoch = Epoch(self.epoch + 1)
        now = self._clock.now()
        self._slots = {SlotId(n): _Slot(SlotId(n), now) for n in range(total_slots)}
        return self.epoch

    def seen(self, infos: Sequence[SlotInfo], asked_at: float = math.inf) -> bool:
        """Take in a look at `GET /slots`; True if it told of a slot what was waited for.

        `asked_at` is when the look began, in the clock's seconds: it tells nothing of a request that was
        sent or dropped since.
        """
        before = self.unsettled + self._unseen
        for info in infos:
            slot = self._slots.get(info.id)
            if slot is None or slot.since > asked_at:
                continue
            if slot.state is SlotState.UNKNOWN and slot.holder is None and not info.is_processing:
                slot.state = advance(slot.state, SlotEvent.SEEN_IDLE)
                slot.is_blank = not info.n_prompt_tokens
            elif slot.state is SlotState.SERVING and info.is_processing:
                slot.was_seen_running = True
            elif slot.settling is not None:
                slot.settling = look(slot.settling, infos, self._clock.now())
                if slot.settling is None:
                    self._settled(slot)
        return self.unsettled + self._unseen < before

    def foreign(self, infos: Sequence[SlotInfo], asked_at: float) -> tuple[SlotId, ...]:
        """The slots in which somebody else ran a task since the look before, though nobody held them.

        What lived there is lost. One in which such a task still runs is not free until it is seen idle.
        `asked_at` as for `seen`. Cheap and not complete: a task between our own and the next look is missed.
        """
        used = [info for info in infos if self._was_used(info, asked_at)]
        for info in used:
            self._drop(self._slots[info.id], is_running=info.is_processing)
        return tuple(info.id for info in used)

    def _was_used(self, info: SlotInfo, asked_at: float) -> bool:
        slot = self._slots.get(info.id)
        is_free = slot is not None and slot.holder is None and slot.free_since < asked_at
        if slot is None or not is_free or slot.state not in (SlotState.IDLE, SlotState.RESIDENT):
            return False
        before, slot.last_task = slot.last_task, SeenTask(info.id_task)
        return info.is_processing or before not in (None, slot.last_task)

    def _drop(self, slot: _Slot, *, is_running: bool) -> None:
        if slot.state is SlotState.RESIDENT:
            self._move(slot, SlotEvent.LOST)
        slot.occupancy, slot.is_blank = None, False
        if is_running:
            self._move(slot, SlotEvent.SERVE)
            self._move(slot, SlotEvent.BROKEN_OFF)
            slot.settling, slot.since = Settling(slot.id, was_seen=True), self._clock.now()

    def assume_blank(self) -> None:
        """The server slept: its slots are empty, and asking `/slots` would wake it."""
        for slot in self._slots.values():
            if slot.state is SlotState.UNKNOWN:  # a look under way when it fell asleep may have come first
                self._move(slot, SlotEvent.SEEN_IDLE)
                slot.is_blank = True

    @property
    def unsettled(self) -> int:
        """How many slots wait to be seen idle."""
        return sum(s.state in (SlotState.UNKNOWN, SlotState.CANCELLING) for s in self._slots.values())

    @property
    def _unseen(self) -> int:
        """How many slots serve a request that was not seen to run."""
        return sum(s.state is SlotState.SERVING and not s.was_seen_running for s in self._slots.values())

    # -- looking -----------------------------------------------------------------------------------------

    @property
    def has_dirty(self) -> bool:
        """Whether any occupant has work that is not saved."""
        return any(s.occupancy is not None and s.occupancy.is_dirty for s in self._slots.values())

    def views(self) -> tuple[SlotView, ...]:
        return tuple(slot.view() for slot in self._slots.values())

    def view(self, slot: SlotId) -> SlotView:
        return self._slots[slot].view()

    def slot_of(self, session: SessionKey) -> SlotView | None:
        return next((v for v in self.views() if v.occupant == session), None)

    # -- leases (called by the desk alone) ----------------------------------------------------------------

    def hold(self, slots: Iterable[SlotId], holder: int) -> None:
        for slot in slots:
            held = self._slots[slot]
            if held.holder is not None:
                raise InvariantError(f"slot {slot} is held by lease {held.holder}, not free for {holder}")
            held.holder = holder

    def let_go(self, slots: Iterable[SlotId], holder: int) -> None:
        for slot in slots:
            held = self._slots[slot]
            if held.holder != holder:
                raise InvariantError(f"lease {holder} gives back slot {slot}, held by {held.holder}")
            held.holder = None
            held.free_since, held.last_task = self._clock.now(), None

    # -- a request ---------------------------------------------------------------------------------------

    def serve(self, slot: SlotId, epoch: Epoch, occupancy: Occupancy | None) -> bool:
        """A request is sent to `slot`; `occupancy` is whose it will be (None: nobody's)."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.SERVE)
        held.occupancy, held.is_blank = occupancy, False
        held.met_doubt = held.pending_actions > 0
        held.was_seen_running, held.since = False, self._clock.now()
        return True

    def launched(self, slot: SlotId, epoch: Epoch) -> bool:
        """The request in `slot` was seen to run: its answer has begun."""
        if (held := self._current(slot, epoch)) is None:
            return False
        held.was_seen_running = True
        return True

    def take(self, slot: SlotId, epoch: Epoch) -> bool:
        """An unpinned request was seen in `slot`: whoever lived there does no more."""
        if (held := self._current(slot, epoch)) is None:
            return False
        if held.state is SlotState.RESIDENT:
            self._move(held, SlotEvent.LOST)
        return self.serve(slot, epoch, None) and self.launched(slot, epoch)

    def served(self, slot: SlotId, epoch: Epoch, occupancy: Occupancy | None) -> bool:
        """The request in `slot` ended; None where what it left is nobody's."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._end(held, occupancy)
        return True

    def broke_off(self, slot: SlotId, epoch: Epoch, settling: Settling) -> bool:
        """The request in `slot` was dropped; its content is settled once it was seen idle."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.BROKEN_OFF)
        held.settling, held.since = settling, self._clock.now()
        return True

    # -- a switch ----------------------------------------------------------------------------------------

    def lose(self, slot: SlotId, epoch: Epoch, *, is_blank: bool = False) -> bool:
        """What `slot` holds is nobody's any more (evicted, erased, or found to be gone)."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.LOST)
        if held.occupancy is not None:
            self.last_switch = self._clock.now()
        held.occupancy, held.is_blank = None, is_blank
        return True

    def start_saving(self, slot: SlotId, epoch: Epoch) -> bool:
        return self._moved(slot, epoch, SlotEvent.SAVE)

    def reshaped(self, slot: SlotId, epoch: Epoch, tokens: int) -> bool:
        """The occupant's slot was brought back to its first `tokens` tokens, which every next request of it
        shares."""
        held = self._current(slot, epoch)
        if held is None or held.occupancy is None:
            return False
        held.occupancy = replace(held.occupancy, tokens=tokens, is_boundary=True)
        return True

    def save_ended(self, slot: SlotId, epoch: Epoch) -> bool:
        """The server is done with the slot; what it wrote is another matter."""
        return self._moved(slot, epoch, SlotEvent.SAVE_ENDED)

    def checkpointed(self, slot: SlotId, epoch: Epoch, session: SessionKey, revision: Revision) -> bool:
        """`revision` of `session` is safe now. False if it does not live in `slot` any more."""
        held = self._current(slot, epoch)
        if held is None or held.occupancy is None or held.occupancy.session != session:
            return False
        held.occupancy = held.occupancy.checkpointed(revision)
        return True

    def start_restoring(self, slot: SlotId, epoch: Epoch) -> bool:
        return self._moved(slot, epoch, SlotEvent.RESTORE)

    def restored(self, slot: SlotId, epoch: Epoch, occupancy: Occupancy) -> bool:
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.RESTORED)
        held.occupancy, held.is_blank = occupancy, False
        return True

    def not_restored(self, slot: SlotId, epoch: Epoch, *, is_blank: bool) -> bool:
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.NOT_RESTORED)
        held.is_blank = is_blank
        return True

    def doubt(self, slot: SlotId, epoch: Epoch) -> bool:
        """A slot action went past its deadline and may still run: believe nothing of the slot."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.DOUBTED)
        held.occupancy, held.is_blank = None, False
        held.pending_actions += 1
        return True

    def fate_known(self, slot: SlotId, epoch: Epoch) -> bool:
        """The action that was doubted has ended, however."""
        if (held := self._current(slot, epoch)) is None:
            return False
        held.pending_actions -= 1
        if held.state is SlotState.QUARANTINED and not held.pending_actions:
            self._move(held, SlotEvent.FATE_KNOWN)
        return True

    # -- inside ------------------------------------------------------------------------------------------

    def _current(self, slot: SlotId, epoch: Epoch) -> _Slot | None:
        return self._slots[slot] if epoch == self.epoch else None

    def _moved(self, slot: SlotId, epoch: Epoch, event: SlotEvent) -> bool:
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, event)
        return True

    def _move(self, slot: _Slot, event: SlotEvent) -> None:
        slot.state = advance(slot.state, event)

    def _settled(self, slot: _Slot) -> None:
        # What a dropped request had computed is kept: a client that retries continues from there.
        occupancy = slot.occupancy
        self._end(slot, occupancy.changed(self._clock.now(), None, 0) if occupancy else None)

    def _end(self, slot: _Slot, occupancy: Occupancy | None) -> None:
        slot.last_used = self._clock.now()
        slot.settling = None
        if slot.pending_actions:
            # A late restore or save may have met this request: nothing here may be saved as a session's.
            slot.occupancy = None
            self._move(slot, SlotEvent.DOUBTED)
        else:
            slot.occupancy = None if slot.met_doubt else occupancy
            self._move(slot, SlotEvent.KEPT if slot.occupancy else SlotEvent.LOST)

    def __repr__(self) -> str:
        cells = ", ".join(
            f"{s.id}:{s.state}{'*' if s.holder is not None else ''}" for s in self._slots.values()
        )
        return f"<SlotTable epoch {self.epoch} [{cells}]>"
