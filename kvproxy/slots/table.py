"""The slot table: the only writer of what we believe of a server's slots.

Every method is synchronous and touches nothing else, so each is atomic among the tasks of one loop. Those
that act for a lease say so by taking it; once its epoch has passed they change nothing and answer False,
because what the holder learned is about a process that is gone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvproxy.clock import Clock
from kvproxy.errors import InvariantError
from kvproxy.identifiers import Epoch, Revision, SessionKey, SlotId
from kvproxy.slots.adrift import Adrift
from kvproxy.slots.record import MAY_BE_IDLE, SlotRecord
from kvproxy.slots.settling import Settling, look
from kvproxy.slots.slot import Occupancy, SlotView
from kvproxy.slots.state import AT_REST, SlotEvent, SlotState
from kvproxy.upstream.replies import SlotInfo


class SlotTable:
    """What we believe of the slots of one server in its present epoch."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots: dict[SlotId, SlotRecord] = {}
        self.epoch = Epoch(0)
        self.last_switch: float | None = None
        """Monotonic seconds at which somebody last had to leave a slot."""
        self.speculates = False
        """Whether a draft model runs ahead of the slots."""
        self.is_volatile = False
        """The server clears every idle slot when it launches a request in another one."""
        self.pool: int | None = None
        """Tokens that all slots may hold together; None where each has a memory of its own, or may have."""
        self._adrift = Adrift()

    # -- a life of the server --------------------------------------------------------------------------

    def begin_epoch(self, total_slots: int) -> Epoch:
        """Forget everything: `total_slots` slots of which nothing is known. Leases of before are void."""
        self.epoch = Epoch(self.epoch + 1)
        self.speculates = self.is_volatile = False
        self.pool = None
        self._adrift = Adrift()
        now = self._clock.now()
        self._slots = {SlotId(n): SlotRecord(SlotId(n), now) for n in range(total_slots)}
        return self.epoch

    def seen(self, infos: Sequence[SlotInfo], asked_at: float = math.inf) -> bool:
        """Take in a look at `GET /slots`; True if it told of a slot what was waited for.

        `asked_at` is when the look began, in the clock's seconds: it tells nothing of a request that was
        sent or dropped since.
        """
        before = self.unsettled + self._unseen
        self.speculates = any(info.is_speculative for info in infos)
        for info in infos:
            slot = self._slots.get(info.id)
            if slot is None or slot.since > asked_at:
                continue
            if slot.state is SlotState.UNKNOWN and slot.holder is None and not info.is_processing:
                self._move(slot, SlotEvent.SEEN_IDLE)
                slot.is_blank = not info.n_prompt_tokens
                slot.weigh(info)
            elif slot.state is SlotState.SERVING and info.is_processing:
                self._launched(slot)
            elif slot.state in AT_REST and not info.is_processing and slot.changed_at < asked_at:
                slot.weigh(info)
                self._trust(slot)
                if slot.was_purged(info):
                    self._oust(slot)
            elif slot.settling is not None:
                slot.settling = look(slot.settling, infos, self._clock.now())
                if slot.settling is None:
                    self._settled(slot)
                    slot.weigh(info)
        return self.unsettled + self._unseen < before

    def foreign(self, infos: Sequence[SlotInfo], asked_at: float) -> tuple[SlotId, ...]:
        """The slots in which somebody else ran a task since the look before, though nobody held them.

        What lived there is lost. One in which such a task still runs is not free until it is seen idle.
        `asked_at` as for `seen`. Cheap and not complete: a task between our own and the next look is missed.
        """
        used = [info for info in infos if (s := self._slots.get(info.id)) and s.was_used(info, asked_at)]
        for info in used:
            self._slots[info.id].drop(info, self._clock.now())
        return tuple(info.id for info in used)

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
        return tuple([slot.view() for slot in self._slots.values()])

    def view(self, slot: SlotId) -> SlotView:
        return self._slots[slot].view()

    def occupancy(self, slot: SlotId) -> Occupancy | None:
        return self._slots[slot].occupancy

    def slot_of(self, session: SessionKey) -> SlotView | None:
        return next((v for v in self.views() if v.occupant == session), None)

    def is_adrift(self, session: SessionKey) -> bool:
        """Whether the newest work of `session` is in no file and in no slot that may be believed: at most
        in the server's own memory, where only a request that is not pinned finds it."""
        return session in self._adrift

    # -- leases (called by the desk alone) ----------------------------------------------------------------

    def hold(self, slots: Iterable[SlotId], holder: int, claim: int = 0, worst: int = 0) -> None:
        """`claim` is how many tokens each of them is thought to hold in the end, `worst` how many at most."""
        for slot in slots:
            held = self._slots[slot]
            if held.holder is not None:
                raise InvariantError(f"slot {slot} is held by lease {held.holder}, not free for {holder}")
            held.holder, held.claim, held.worst = holder, claim, worst

    def let_go(self, slots: Iterable[SlotId], holder: int) -> None:
        for slot in slots:
            held = self._slots[slot]
            if held.holder != holder:
                raise InvariantError(f"lease {holder} gives back slot {slot}, held by {held.holder}")
            held.release(self._clock.now())
            if held.was_swept and held.state is SlotState.RESIDENT:
                self._wash_away(held)

    # -- a request ---------------------------------------------------------------------------------------

    def serve(self, slot: SlotId, epoch: Epoch, occupancy: Occupancy | None) -> bool:
        """A request is sent to `slot`; `occupancy` is whose it will be (None: nobody's)."""
        if (held := self._current(slot, epoch)) is None:
            return False
        held.begin(occupancy, self._clock.now())
        self._review()
        if occupancy is not None:
            self._adrift.back(occupancy.session)
        return True

    def launched(self, slot: SlotId, epoch: Epoch) -> bool:
        """The request in `slot` was seen to run: its answer has begun."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._launched(held)
        return True

    def take(self, slot: SlotId, epoch: Epoch, occupancy: Occupancy | None = None) -> bool:
        """An unpinned request was seen in `slot`: it is `occupancy`'s now, whoever lived there before."""
        if (held := self._current(slot, epoch)) is None:
            return False
        if held.state is SlotState.RESIDENT:
            self._oust(held)
        old = None if occupancy is None else self.slot_of(occupancy.session)
        if old is not None and old.id != slot and old.state is SlotState.RESIDENT:
            self.lose(old.id, epoch)  # what its session left there is older
        return self.serve(slot, epoch, occupancy) and self.launched(slot, epoch)

    def served(
        self, slot: SlotId, epoch: Epoch, occupancy: Occupancy | None, tokens: int | None = None
    ) -> bool:
        """The request in `slot` ended; `occupancy` is None where what it left is nobody's. `tokens` is how
        many that are, None if it is as `occupancy` says, or not known."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._launched(held)
        held.end(occupancy, tokens, self._clock.now())
        self._trust(held)
        return True

    def broke_off(self, slot: SlotId, epoch: Epoch, settling: Settling) -> bool:
        """The request in `slot` was dropped; its content is settled once it was seen idle."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.BROKEN_OFF)
        held.settling, held.since = settling, self._clock.now()
        return True

    def start_emptying(self, slot: SlotId, epoch: Epoch) -> bool:
        """`slot` is erased under the request it serves, which failed and is to be sent again."""
        if (held := self._current(slot, epoch)) is None:
            return False
        held.pending_actions += 1
        held.met_doubt = True
        return True

    def emptied(self, slot: SlotId, epoch: Epoch) -> bool:
        """That erase has ended in time."""
        if (held := self._current(slot, epoch)) is None:
            return False
        held.end_action(self._clock.now())
        held.met_doubt = held.pending_actions > 0
        return True

    # -- a server that clears idle slots -----------------------------------------------------------------

    def found_volatile(self) -> None:
        """The server clears idle slots: none that nobody has in hand is believed any more."""
        self.is_volatile = True
        self._sweep(None)

    def drift(self, stay: Occupancy, epoch: Epoch) -> None:
        """What `stay` holds could not be saved, and its slot is not to be believed: its session is adrift."""
        if epoch != self.epoch:
            return
        self._adrift.add(stay)
        view = self.slot_of(stay.session)
        if view is not None and view.state is SlotState.RESIDENT:
            self._wash_away(self._slots[view.id])

    # -- a switch ----------------------------------------------------------------------------------------

    def lose(self, slot: SlotId, epoch: Epoch, *, is_blank: bool = False) -> bool:
        """What `slot` holds is nobody's any more (evicted, erased, or found to be gone)."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.LOST)
        if held.occupancy is not None:
            self.last_switch = self._clock.now()
        held.empty(is_blank=is_blank)
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
        held.cells = tokens
        return True

    def save_ended(self, slot: SlotId, epoch: Epoch) -> bool:
        """The server is done with the slot; what it wrote is another matter."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.SAVE_ENDED)
        if held.was_swept:
            self._wash_away(held)
        return True

    def checkpointed(self, slot: SlotId, epoch: Epoch, session: SessionKey, revision: Revision) -> bool:
        """`revision` of `session` is safe now. False if it does not live in `slot` any more."""
        held = self._current(slot, epoch)
        if held is not None:
            self._adrift.saved(session, revision)
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
        held.count(occupancy.tokens)
        self._trust(held)
        return True

    def readopt(self, slot: SlotId, epoch: Epoch, occupancy: Occupancy) -> bool:
        """It was proven that `slot` still holds what an earlier kvproxy left there."""
        held = self._slots.get(slot) if epoch == self.epoch else None
        if held is None or held.state is not SlotState.IDLE:
            return False
        # As by a restore, for which nothing had to be moved.
        self._move(held, SlotEvent.RESTORE)
        return self.restored(slot, epoch, occupancy)

    def not_restored(self, slot: SlotId, epoch: Epoch, *, is_blank: bool) -> bool:
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.NOT_RESTORED)
        held.empty(is_blank=is_blank)
        return True

    def doubt(self, slot: SlotId, epoch: Epoch) -> bool:
        """A slot action went past its deadline and may still run: believe nothing of the slot."""
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, SlotEvent.DOUBTED)
        held.empty(is_blank=False)
        held.grow()
        held.pending_actions += 1
        return True

    def fate_known(self, slot: SlotId, epoch: Epoch) -> bool:
        """The action that was doubted has ended, however."""
        if (held := self._current(slot, epoch)) is None:
            return False
        held.end_action(self._clock.now())
        return True

    # -- inside ------------------------------------------------------------------------------------------

    def _current(self, slot: SlotId, epoch: Epoch) -> SlotRecord | None:
        return self._slots[slot] if epoch == self.epoch else None

    def _moved(self, slot: SlotId, epoch: Epoch, event: SlotEvent) -> bool:
        if (held := self._current(slot, epoch)) is None:
            return False
        self._move(held, event)
        return True

    def _move(self, slot: SlotRecord, event: SlotEvent) -> None:
        slot.move(event, self._clock.now())

    def _trust(self, slot: SlotRecord) -> None:
        """What it holds was just learned."""
        slot.is_sure = self.pool is None or not slot.is_at_risk(self._slots.values(), self.pool)

    def _launched(self, slot: SlotRecord) -> None:
        if not slot.was_seen_running:
            slot.was_seen_running = True
            self._sweep(slot)

    def _sweep(self, launched: SlotRecord | None) -> None:
        """A launch clears every other slot in which nothing runs."""
        if not self.is_volatile:
            return
        holders = (None, launched.holder if launched else None)
        for slot in self._slots.values():
            if slot is launched:
                continue
            if slot.state is SlotState.RESIDENT and slot.holder in holders:
                self._wash_away(slot)
            elif slot.state in MAY_BE_IDLE:
                slot.was_swept = True
            elif slot.state is SlotState.IDLE:
                slot.cells = 0

    def _review(self) -> None:
        """From now on more may be needed than there is."""
        if (pool := self.pool) is None:
            return
        for slot in self._slots.values():
            slot.is_sure = slot.is_sure and not slot.is_at_risk(self._slots.values(), pool)

    def _oust(self, slot: SlotRecord) -> None:
        """Whoever lived there does no more."""
        if self.is_volatile:
            self._wash_away(slot)
        else:
            self._move(slot, SlotEvent.LOST)
            slot.empty(is_blank=True)

    def _wash_away(self, slot: SlotRecord) -> None:
        """The server emptied it, or may have. It is not called blank: one that only ran out of room empties
        some slots and leaves others."""
        if slot.occupancy is not None and slot.occupancy.is_dirty:
            self._adrift.add(slot.occupancy)
        self._move(slot, SlotEvent.LOST)
        slot.empty(is_blank=False)
        slot.cells = 0

    def _settled(self, slot: SlotRecord) -> None:
        # What a dropped request had computed is kept: a client that retries continues from there.
        occupancy = slot.occupancy
        was_swept, slot.was_swept = slot.was_swept, False
        self._launched(slot)
        now = self._clock.now()
        slot.end(occupancy.changed(now, None, 0) if occupancy else None, None, now)
        if was_swept and slot.state is SlotState.RESIDENT:
            self._wash_away(slot)

    def __repr__(self) -> str:
        cells = ", ".join(map(str, self._slots.values()))
        return f"<SlotTable epoch {self.epoch} [{cells}]>"
