"""Makes the slot in which a conversation is to go on the one that the server will choose.

`/v1/messages` names no slot. The server takes the idle slot that shares the longest beginning with the
prompt, if that is more than a tenth of it, else the one used least recently. So what the conversation has
computed is brought into a slot before (where it does not live in one), and the server finds it there. That
is a belief: which slot it took is looked up afterwards, and that one is the conversation's then. Whoever
else could lose a slot by it was saved before; where that could not be done, the prompt is computed in a slot
of our choice first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvproxy.boundary.continuations import NoBoundary
from kvproxy.boundary.prefix import prompt_ids
from kvproxy.checkpoint.outcome import Outcome, Preparation, Reason
from kvproxy.checkpoint.preparer import Preparer
from kvproxy.checkpoint.shaper import Shaper
from kvproxy.errors import ErrorCode, ReplyError
from kvproxy.identifiers import SlotId
from kvproxy.proxy.call import Call
from kvproxy.proxy.recogniser import Owner, Recogniser
from kvproxy.proxy.stays import new_stay
from kvproxy.sessions.session import Session
from kvproxy.slots.leases import Lease, LeaseDesk
from kvproxy.slots.placement import place
from kvproxy.slots.slot import Occupancy
from kvproxy.tasks import TaskSet
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Completed, Unavailable

PREFILL_SECONDS = 3600.0
"""For a whole prompt, which takes what it takes."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Where an unpinned request is meant to run, and whose it is.

    `slot` is the one it should be found in, None if that is the server's to say. `stay` is that of `session`,
    which goes on or begins there; both are None where what it computes is nobody's.
    """

    preparation: Preparation
    session: Session | None = None
    slot: SlotId | None = None
    stay: Occupancy | None = None
    computed: Completed | None = None
    """What it took to compute the prompt there before, where that was done."""

    @property
    def tokens(self) -> int | None:
        """What the intended slot is believed to hold."""
        return None if self.slot is None or self.stay is None else self.stay.tokens


NOWHERE = Aim(Preparation(Outcome.COLD))


@dataclass(frozen=True, slots=True)
class Steering:
    """`is_exact`: the prompt is always computed in the intended slot first, by a request pinned to it. Then
    no other slot can share more."""

    desk: LeaseDesk
    preparer: Preparer
    shaper: Shaper
    recogniser: Recogniser
    client: LlamaServer
    tasks: TaskSet
    is_exact: bool

    async def aim(self, lease: Lease, owner: Owner) -> Aim | ReplyError:
        """`lease` is on all free slots, whose occupants are saved."""
        session = owner.session
        if lease.is_void:
            return NOWHERE
        own = self.desk.table.slot_of(session.key)
        if own is not None and own.id not in lease.slots:
            return self._beside(owner)
        self.recogniser.runs_at_home(owner)
        target = own.id if own is not None else self._room(lease, session)
        endangers = self._endangers(lease, target)
        if own is None and not (self.is_exact or endangers or self.preparer.has_stored(session)):
            return Aim(self.preparer.leave_cold(lease, session), session, stay=new_stay(session))
        if target is None or lease.is_void:
            return NOWHERE
        return await self._bring(lease.part(target), owner, endangers=endangers)

    def _endangers(self, lease: Lease, target: SlotId | None) -> bool:
        """Whether the server might put a request that finds nothing of its own in `target` in the place of
        somebody who could not be saved."""
        others = () if target is None else (slot for slot in lease.slots if slot != target)
        return any(self.preparer.is_at_risk(slot) for slot in others)

    def _beside(self, owner: Owner) -> Aim:
        """The conversation's slot serves another request of it: this one begins a branch of its own, if it
        says enough to be known again."""
        branch = self.recogniser.runs_elsewhere(owner)
        stay = None if branch is None else new_stay(branch)
        return Aim(Preparation(Outcome.COLD, Reason.SESSION_BUSY), branch, stay=stay)

    async def _bring(self, part: Lease, owner: Owner, *, endangers: bool) -> Aim | ReplyError:
        session = owner.session
        at_once = self.preparer.at_once(part, session)
        preparation = at_once or await self.preparer.prepare(part, session, owner.call.asked)
        if isinstance(preparation, ReplyError) or part.is_void:
            return preparation if isinstance(preparation, ReplyError) else NOWHERE
        if preparation.from_scratch and not await self.preparer.start_over(part):
            return NOWHERE if part.is_void else _cannot_start_over()
        view = self.desk.table.view(part.slot)
        is_exact = self.is_exact or (endangers and preparation.outcome is Outcome.COLD)
        computed = await self._compute(part, owner.call) if is_exact else None
        is_there = view.occupant == session.key or computed is not None
        slot = part.slot if is_there else None
        return Aim(preparation, session, slot, view.occupancy or new_stay(session), computed)

    def _room(self, lease: Lease, session: Session) -> SlotId | None:
        """The held slot that a conversation without one would get."""
        mine = frozenset(lease.slots)
        views = self.desk.table.views()
        ours = [replace(view, is_leased=view.is_leased and view.id not in mine) for view in views]
        placement = place(session.key, ours, self.desk.set_apart)
        return None if placement is None else placement.slot

    async def _compute(self, part: Lease, call: Call) -> Completed | None:
        """Compute the prompt in its slot; None if that was not done."""
        asked = call.reading
        ids = None if asked is None else await prompt_ids(self.client, asked.label, asked.document)
        if ids is None or isinstance(ids, NoBoundary) or part.is_void:
            return None
        done = await self.client.complete(part.slot, ids, n_predict=0, timeout=PREFILL_SECONDS)
        if not isinstance(done, Unavailable):
            return done
        self.desk.table.doubt(part.slot, part.epoch)
        self.tasks.spawn(self._until_idle(part), name="see a prefill end")
        return None

    async def _until_idle(self, part: Lease) -> None:
        await self.shaper.until_idle(part.slot, part.epoch)
        self.desk.table.fate_known(part.slot, part.epoch)
        self.preparer.slots_changed()


def _cannot_start_over() -> ReplyError:
    """The server would find there what it must not go on from."""
    message = "what is left in its slot could not be erased"
    return ReplyError(ErrorCode.ERASE_FAILED, message, status=503, retry_after_seconds=5)
