"""Makes a slot ready for a request: save who lives there, bring back who is to, or leave it blank.

    resident                                         nothing
    somebody else lives there    save them (switch), then
        the session is stored    restore
        it is not                erase: what is left of another conversation is nobody's,
                                 unless both open alike: then it is a beginning that need not be computed

Where all slots share one memory, idle ones are emptied before (`make_way`) as far as it takes: the server
would empty others than those that are missed least, and not say which.

Runs in a task of the house. A client that leaves meanwhile does not tear a save or a restore apart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvproxy.boundary.turn import Asked
from kvproxy.checkpoint.actions import ERASE_SECONDS
from kvproxy.checkpoint.checkpointer import Checkpointer
from kvproxy.checkpoint.extension import is_extended
from kvproxy.checkpoint.outcome import (
    CheckpointOutcome,
    Outcome,
    Preparation,
    Reason,
    Restoration,
    RestoreOutcome,
    Trigger,
)
from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.publisher import Checkpoint
from kvproxy.checkpoint.restorer import Restorer
from kvproxy.errors import ErrorCode, ReplyError
from kvproxy.identifiers import Epoch, Revision, SessionKey, SlotId, short
from kvproxy.sessions.session import Session
from kvproxy.slots.cells import has_room, next_to_empty
from kvproxy.slots.leases import Lease
from kvproxy.slots.slot import Occupancy, Stump
from kvproxy.slots.state import SlotState
from kvproxy.telemetry.events import SessionCold, SessionSwitched

_REASONS = {
    RestoreOutcome.FINGERPRINT_MISMATCH: Reason.FINGERPRINT_MISMATCH,
    RestoreOutcome.SNAPSHOT_INVALID: Reason.SNAPSHOT_INVALID,
    RestoreOutcome.DOES_NOT_FIT: Reason.NOT_WORTH_IT,
    RestoreOutcome.NOT_EXTENDED: Reason.PREFIX_DIVERGED,
    RestoreOutcome.WINDOW_SHUT: Reason.NOT_WORTH_IT,
    RestoreOutcome.BREAKER_OPEN: Reason.BREAKER_OPEN,
    RestoreOutcome.OFF: Reason.PERSISTENCE_OFF,
    RestoreOutcome.DISABLED: Reason.RESTORE_OFF,
}


_MAY_BE_EMPTIED = frozenset(
    {
        CheckpointOutcome.PUBLISHED,
        CheckpointOutcome.CLEAN,
        CheckpointOutcome.TOO_SMALL,
        CheckpointOutcome.OFF,
        CheckpointOutcome.UNWANTED,
    }
)
"""It is safe, or not to be kept."""


_NOTHING_TRIED = frozenset({RestoreOutcome.NO_SNAPSHOT, RestoreOutcome.OFF, RestoreOutcome.DISABLED})
"""What a conversation that was never heard of is not told: it could not come back anyway."""


class Preparer:
    def __init__(
        self,
        parts: Parts,
        checkpointer: Checkpointer,
        restorer: Restorer,
        *,
        on_switch: bool,
        is_strict: bool,
        borrow: Callable[[Lease, SlotId | None], Lease | None],
        look: Callable[[], Awaitable[None]],
    ) -> None:
        self._p = parts
        self._checkpointer = checkpointer
        self._restorer = restorer
        self._on_switch = on_switch
        self._is_strict = is_strict
        self._borrow = borrow
        self._look = look

    def at_once(self, lease: Lease, session: Session | None) -> Preparation | None:
        """The preparation of a slot that is ready as it is; None if there is something to do."""
        if session is None or lease.is_void:
            return None
        stay = self._p.table.occupancy(lease.slot)
        if stay is None or stay.session != session.key or stay.stump is not None:
            return None
        self._forget_request(session)
        return Preparation(Outcome.RESIDENT)

    def is_certain(self, lease: Lease) -> bool:
        """Whether the slot of `lease` holds what it is believed to, and its request has room beside what the
        others hold; to be asked before it is relied upon, and at no cost where slots share nothing."""
        table = self._p.table
        if table.pool is None or table.is_volatile or lease.is_void:
            return True  # a launch that clears the idle slots makes its own room
        views = table.views()
        return table.view(lease.slot).is_sure and has_room(table.pool, lease.want.cells, lease.slot, views)

    async def make_certain(self, lease: Lease) -> None:
        if not self.is_certain(lease):
            await self._look()
            await self.make_way(lease, lease.want.cells)

    async def make_way(self, lease: Lease, cells: int) -> None:
        """Empty idle slots of a shared memory, those first that are missed least, until the slot of `lease`
        may come to hold `cells` tokens. Whoever lives there is saved first."""
        table, tried = self._p.table, set[SlotId]()
        while not lease.is_void and table.pool is not None:
            slot = next_to_empty(table.pool, cells, lease.slot, table.views(), tried)
            borrowed = None if slot is None else self._borrow(lease, slot)
            if slot is None or borrowed is None:
                return
            tried.add(slot)
            try:
                await self._empty(borrowed, slot)
            finally:
                borrowed.release()

    async def prepare(
        self, lease: Lease, session: Session | None, asked: Asked | None
    ) -> Preparation | ReplyError:
        """Make the slot of `lease` ready for `session` (None: for a request that owns nothing).

        `asked` is this request: a newer one of the session may wait by now.
        """
        try:
            return await self._prepare(lease, session, asked)
        finally:
            if session is not None:
                self._forget_request(session)

    def _forget_request(self, session: Session) -> None:
        """Once it is known what to restore for a request, its document is of use only where the slot may
        have to be brought back to it; one is held for each session."""
        if session.asked is not None and self._p.standing.facts.kind.may_roll_back:
            session.asked = None

    async def _prepare(
        self, lease: Lease, session: Session | None, asked: Asked | None
    ) -> Preparation | ReplyError:
        if lease.is_void:
            return self._cold(lease, session, Reason.SERVER_RESTARTED)
        stay = self._p.table.view(lease.slot).occupancy
        if session is not None and stay is not None and stay.session == session.key and stay.stump:
            return await self._go_on(lease, session, asked, stay.stump)
        if stay is not None and (refusal := await self.vacate(lease, lease.slot, session)) is not None:
            return refusal
        if session is None or lease.is_fork:
            reason = Reason.SESSION_BUSY if lease.is_fork else Reason.NO_SNAPSHOT
            return self._cold(lease, session, reason, from_scratch=await self._blank(lease, stay, session))
        return await self._bring_back(lease, session, asked, stay)

    async def _go_on(self, lease: Lease, session: Session, asked: Asked | None, stump: Stump) -> Preparation:
        """In the session's own slot, if its prompt is known to reach beyond what is not whole there."""
        if await is_extended(self._p, stump.tokens, stump.ids_digest, asked):
            return Preparation(Outcome.RESIDENT)
        return self._cold(lease, session, Reason.PREFIX_DIVERGED, from_scratch=True)

    async def start_over(self, lease: Lease) -> bool:
        """Empty the slot of `lease`, whose occupant goes on there with nothing of it; whether it is."""
        if not lease.is_void and self._p.table.view(lease.slot).state is SlotState.RESIDENT:
            self._p.table.lose(lease.slot, lease.epoch)
        await self.erase(lease)
        return not lease.is_void and self._p.table.view(lease.slot).is_blank

    def has_stored(self, session: Session) -> bool:
        """Whether there is, or may soon be, a snapshot of it."""
        is_being_written = self._checkpointer.publisher.running(session.key, Revision(0)) is not None
        return is_being_written or bool(self._p.store.find_any(session.key))

    def is_at_risk(self, slot: SlotId) -> bool:
        """Whether who lives in `slot` would lose work with it, since it could not be saved."""
        return self._checkpointer.is_at_risk(slot)

    def leave_cold(self, lease: Lease, session: Session) -> Preparation:
        """The preparation of a request for which there is nothing to bring back."""
        return self._cold(lease, session, _reason(session, Restoration(RestoreOutcome.NO_SNAPSHOT)))

    def slots_changed(self) -> None:
        """A slot became usable behind the back of every lease."""
        self._p.slots_changed()

    async def vacate(self, lease: Lease, slot: SlotId, newcomer: Session | None) -> ReplyError | None:
        """End the stay of whoever lives in `slot`, saved first."""
        occupant = self._p.table.view(slot).occupant
        if occupant is None:
            return None
        refusal = await self.secure(lease, slot)
        if refusal is not None:
            return refusal
        if not lease.is_void and self._p.table.view(slot).state is SlotState.RESIDENT:
            self._p.table.lose(slot, lease.epoch)
        name = None if newcomer is None else short(newcomer.key)
        self._p.emit(SessionSwitched(self._p.server, slot, short(occupant), name))
        return None

    async def secure(self, lease: Lease, slot: SlotId) -> ReplyError | None:
        """Save whoever lives in `slot`, if that is wanted. A refusal only in strict mode."""
        if not self._on_switch:
            return None
        result = await self._checkpointer.write(slot, lease.epoch, Trigger.SWITCH)
        if self._is_strict and not isinstance(result, Checkpoint):
            result = await result
        if self._is_strict and isinstance(result, Checkpoint) and result.outcome.loses_work:
            return ReplyError(
                ErrorCode.SAVE_FAILED,
                f"the conversation in slot {slot} could not be saved: {result.detail}",
                status=503,
                retry_after_seconds=5,
            )
        return None

    async def _bring_back(
        self, lease: Lease, session: Session, asked: Asked | None, before: Occupancy | None
    ) -> Preparation | ReplyError:
        if lease.is_void or self._p.table.view(lease.slot).state is not SlotState.IDLE:
            reason = self._reason_without_trying(session)
            return self._cold(lease, session, reason, from_scratch=_is_stump(before))
        await self._checkpointer.publisher.settled(session.key)
        result = await self._restore(lease, session, asked)
        if result.outcome is RestoreOutcome.MEMORY_FULL and await self._make_room(lease):
            result = await self._restore(lease, session, asked)
            if result.outcome is RestoreOutcome.RESTORED:
                self._p.shares(lease.epoch, True)
        if result.outcome is RestoreOutcome.RESTORED:
            return Preparation(Outcome.RESTORED, restored_tokens=result.tokens)
        if self._is_strict and result.outcome.is_failure:
            return ReplyError(
                ErrorCode.RESTORE_FAILED,
                f"the conversation could not be restored: {result.detail}",
                status=503,
                retry_after_seconds=5,
            )
        is_unfit = await self._blank(lease, before, session)
        return self._cold(lease, session, _reason(session, result), from_scratch=is_unfit)

    async def _make_room(self, lease: Lease) -> bool:
        """Empty the other idle slots, whoever lives there saved first. False if there is none to empty."""
        borrowed = self._borrow(lease, None)
        if borrowed is None:
            return False
        try:
            return any([await self._empty(borrowed, slot) for slot in borrowed.slots])
        finally:
            borrowed.release()

    async def _empty(self, borrowed: Lease, slot: SlotId) -> bool:
        if borrowed.is_void or self._p.table.view(slot).is_blank:
            return False
        if not await self._is_saved(borrowed, slot) or borrowed.is_void:
            return False
        if self._p.table.view(slot).state is SlotState.RESIDENT:
            self._p.table.lose(slot, borrowed.epoch)
        await self._erase(slot, borrowed.epoch)
        return not borrowed.is_void and self._p.table.view(slot).is_blank

    async def _is_saved(self, borrowed: Lease, slot: SlotId) -> bool:
        if self._p.table.view(slot).occupant is None:
            return True
        result = await self._checkpointer.save(slot, borrowed.epoch, Trigger.SWITCH)
        return result.outcome in _MAY_BE_EMPTIED

    async def _restore(self, lease: Lease, session: Session, asked: Asked | None) -> Restoration:
        return await self._restorer.restore(
            lease.slot,
            lease.epoch,
            session.key,
            session.revision,
            asked,
            lambda tokens: self.make_way(lease, max(tokens, lease.want.cells)),
        )

    def _reason_without_trying(self, session: Session) -> Reason:
        """The slot is in no condition to be restored into."""
        if self._p.store.find_any(session.key):
            return Reason.RESTORE_FAILED
        return _reason(session, Restoration(RestoreOutcome.NO_SNAPSHOT))

    async def _blank(self, lease: Lease, before: Occupancy | None, newcomer: Session | None) -> bool:
        """Erase what is left of another conversation, and of any where a draft model remembers it too: an
        error may have left the two in disagreement. True if there is something left that may not be used."""
        is_shared = (
            newcomer is not None and before is not None and self._opens_alike(before.session, newcomer)
        )
        if self._p.table.speculates or _is_stump(before) or (before is not None and not is_shared):
            await self.erase(lease)
        return _is_stump(before) and not lease.is_void and not self._p.table.view(lease.slot).is_blank

    async def erase(self, lease: Lease) -> None:
        """Empty a slot nobody lives in, if that can be done now: one that is not only answers sooner."""
        await self._erase(lease.slot, lease.epoch)

    async def _erase(self, slot: SlotId, epoch: Epoch) -> None:
        if epoch != self._p.table.epoch or not self._p.standing.facts.persistence.may_save:
            return
        view = self._p.table.view(slot)
        if view.is_blank or view.state is not SlotState.IDLE:
            return
        attempt = await self._p.actions.run(
            lambda: self._p.client.start_erase(view.id),
            epoch,
            ERASE_SECONDS,
            lambda _: self._late(slot, epoch),
        )
        self._p.actions.judge(attempt, well=None)
        if attempt.timed_out:
            self._p.table.doubt(slot, epoch)
        elif attempt.succeeded:
            self._p.table.lose(slot, epoch, is_blank=True)

    async def empty(self, lease: Lease) -> bool:
        """Erase the slot under a request that has failed and is to be sent again; False if that may not
        have been done."""
        slot, epoch = lease.slot, lease.epoch
        if not self._p.standing.facts.persistence.may_save or not self._p.table.start_emptying(slot, epoch):
            return False
        attempt = await self._p.actions.run(
            lambda: self._p.client.start_erase(slot), epoch, ERASE_SECONDS, lambda _: self._late(slot, epoch)
        )
        self._p.actions.judge(attempt, well=None)
        if not attempt.timed_out:
            self._p.table.emptied(slot, epoch)
            if lease.is_released:  # its client has left, and the slot may have waited for this alone
                self._p.slots_changed()
        return attempt.succeeded and not lease.is_void

    def _opens_alike(self, evicted: SessionKey, newcomer: Session) -> bool:
        other = self._p.registry.find(evicted)
        return newcomer.opening is not None and other is not None and other.opening == newcomer.opening

    def _late(self, slot: SlotId, epoch: Epoch) -> None:
        self._p.table.fate_known(slot, epoch)
        self._p.slots_changed()

    def _cold(
        self, lease: Lease, session: Session | None, reason: Reason, *, from_scratch: bool = False
    ) -> Preparation:
        if session is not None:
            slot = lease.slots[0] if len(lease.slots) == 1 else None
            self._p.emit(SessionCold(self._p.server, slot, short(session.key), reason))
        return Preparation(Outcome.COLD, reason, from_scratch=from_scratch)


def _is_stump(stay: Occupancy | None) -> bool:
    return stay is not None and stay.stump is not None


def _reason(session: Session, result: Restoration) -> Reason:
    if not session.requests and result.outcome in _NOTHING_TRIED:
        return Reason.NEW_SESSION
    if result.outcome is RestoreOutcome.NO_SNAPSHOT:
        if session.lost_to_restart:
            return Reason.SERVER_RESTARTED
        return Reason.EVICTED if session.was_resident else Reason.NO_SNAPSHOT
    return _REASONS.get(result.outcome, Reason.RESTORE_FAILED)
