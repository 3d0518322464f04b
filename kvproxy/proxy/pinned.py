"""Requests pinned to one slot: prepare it, run, and write down what the answer left in it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvproxy.checkpoint.checkpointer import Checkpointer
from kvproxy.checkpoint.mooring import Moorings
from kvproxy.checkpoint.outcome import Outcome, Preparation, Trigger, Verdict
from kvproxy.checkpoint.parts import Shares
from kvproxy.checkpoint.policy import CheckpointPolicy, after_request
from kvproxy.checkpoint.preparer import Preparer
from kvproxy.checkpoint.proofs import Proofs
from kvproxy.checkpoint.shaper import Shaper
from kvproxy.clock import Clock
from kvproxy.errors import InvariantError, ReplyError, UpstreamError
from kvproxy.frozen import frozen
from kvproxy.identifiers import SlotId
from kvproxy.proxy.call import Call
from kvproxy.proxy.holding import Holder
from kvproxy.proxy.lessons import learn
from kvproxy.proxy.recogniser import Owner, Recogniser
from kvproxy.proxy.relay import Ending, RelayedResponse
from kvproxy.proxy.rewrite import splice
from kvproxy.proxy.sending import Sender
from kvproxy.proxy.stays import new_stay, remember, stay_after, tokens_after
from kvproxy.proxy.visit import Visit
from kvproxy.sessions.session import Session
from kvproxy.slots.leases import Lease, Purpose, Want
from kvproxy.slots.needs import Measure, Need, Needs
from kvproxy.slots.settling import Settling
from kvproxy.slots.slot import Occupancy
from kvproxy.slots.state import UNDER_WAY, SlotState
from kvproxy.slots.table import SlotTable
from kvproxy.upstream.probe import Probe
from kvproxy.upstream.replies import OUT_OF_ROOM, STALE_DRAFT, Usage
from kvproxy.upstream.volatility import Volatility

LAUNCH_SECONDS = 60.0
"""How long others wait, at a server that clears idle slots, for a request to be seen running there."""


@frozen
class _Run:
    """A request about to be sent. `session` is whose it is, None if it owns nothing; `before` is the slot's
    occupancy as prepared, `stay` the one to be."""

    visit: Visit
    lease: Lease
    slot: SlotId
    session: Session | None
    before: Occupancy | None
    stay: Occupancy | None
    shortfalls: int
    """How many times the server had run out of room before it."""
    is_from_scratch: bool

    @property
    def uses_cache(self) -> bool | None:
        """Whether it may go on from what the slot holds; None for the client to say."""
        if self.is_from_scratch:
            return False
        return True if self.visit.call.is_owner else None


class _RanOut(Exception):
    """The server had no room for it beside others, and has emptied the slots of all that ran."""


@dataclass(frozen=True, slots=True)
class PinnedRequests:
    table: SlotTable
    holder: Holder
    sender: Sender
    preparer: Preparer
    proofs: Proofs
    checkpointer: Checkpointer
    shaper: Shaper
    moorings: Moorings
    probe: Probe
    volatility: Volatility
    recogniser: Recogniser
    policy: CheckpointPolicy
    needs: Needs
    shares: Shares
    clock: Clock

    async def serve(self, visit: Visit, owner: Owner | None) -> RelayedResponse | None:
        """The answer; None if it has to begin again: the server became another one before the request was
        sent or had no room for it, or its conversation is not to be pinned any more."""
        named = owner.session if owner else None
        need = self._need(visit, named)
        want = Want(Purpose.PINNED, named.key if named else None, need.thought, need.at_worst)
        lease = await self.holder.acquire(want, visit)
        if lease is None:
            return None
        if named is not None and self.moorings.is_adrift(named.key):
            self.holder.release(lease)
            return None
        session = self._settled(owner, lease)
        preparation: Preparation | ReplyError | None = None
        if not self.moorings.loose and self.preparer.is_certain(lease):
            preparation = self.preparer.at_once(lease, session)
        if preparation is None:
            preparation = await self.holder.see_through(
                lease, visit.vigil, self._prepare(lease, session, visit.call)
            )
        if isinstance(preparation, ReplyError):
            self.holder.release(lease)
            raise preparation
        await self.holder.depart(lease, visit.vigil)
        if lease.is_void or self._was_emptied(lease, preparation):
            self.holder.release(lease)
            return None
        slot = lease.slot
        before = stay = self.table.occupancy(slot)
        visit.account.prepared(
            visit.shown(preparation), session or named, slot, before.tokens if before else None
        )
        if session is not None and (before is None or preparation.from_scratch):
            stay = new_stay(session)
        shortfalls, from_scratch = self.needs.shortfalls, preparation.from_scratch
        return await self._run(_Run(visit, lease, slot, session, before, stay, shortfalls, from_scratch))

    def _settled(self, owner: Owner | None, lease: Lease) -> Session | None:
        """Whose the request is where it runs; None if it owns nothing there."""
        if owner is None:
            return None
        if lease.is_fork:
            return self.recogniser.runs_elsewhere(owner)
        self.recogniser.runs_at_home(owner)
        return owner.session

    def _was_emptied(self, lease: Lease, preparation: Preparation) -> bool:
        """Whether a look at the slots has shown since that what was found in the slot is there no more."""
        is_resident = preparation.outcome is Outcome.RESIDENT
        return is_resident and self.table.occupancy(lease.slot) is None

    async def _prepare(self, lease: Lease, session: Session | None, call: Call) -> Preparation | ReplyError:
        await self.moorings.moor_loose(lease.epoch)
        await self.preparer.make_certain(lease)
        at_once = self.preparer.at_once(lease, session)
        preparation = at_once or await self.preparer.prepare(lease, session, call.asked)
        # It took a while. A server that is another one by now may have fewer slots, and would run the
        # request in one of them that is in use.
        await self.holder.watch.confirm()
        return preparation

    def _need(self, visit: Visit, session: Session | None) -> Need:
        known = None if session is None else session.measure
        need = self.needs.of(len(visit.call.body), visit.call.answer_limit, known, self.table.pool)
        # A second time it must not end others with it.
        return Need(need.at_worst, need.at_worst) if visit.account.has_begun_again else need

    async def _run(self, run: _Run) -> RelayedResponse | None:
        """The request itself; None if it has to begin again. Whatever happens, the slot is settled and the
        lease has one end."""
        call, lease, began = run.visit.call, run.lease, self.clock.now()
        self.table.serve(run.slot, lease.epoch, run.stay)
        self.holder.desk.reconsider()
        seen = asyncio.get_running_loop().call_later(LAUNCH_SECONDS, self.holder.desk.launched, lease)
        after: Trigger | None = None
        try:
            body = splice(call.body, run.slot, cache_prompt=run.uses_cache)
            if body is None:
                raise InvariantError("a body that cannot be spliced was to be pinned")
            response = await self.sender.send(
                run.visit,
                body,
                lambda: self.holder.desk.launched(lease),
                lambda said: self._mend(run, said),
            )
            after = self._settle(run, response)
        except _RanOut:
            self._ran_out(run.lease)
            run.visit.account.begins_again()
            return None
        except UpstreamError as error:
            if error.was_sent:
                self._dropped(run)
            else:
                self.table.served(run.slot, lease.epoch, run.before)
            raise
        except BaseException:
            self._dropped(run)
            raise
        finally:
            seen.cancel()
            self._end(run, after)
        self.volatility.request_ended(run.slot, began)
        verdict = run.visit.account.done(response)
        if run.session is not None:
            self.proofs.proved(run.slot, run.session.key, verdict)
        if self.table.pool is not None:
            self._doubt_others(verdict)
        return response

    def _doubt_others(self, verdict: Verdict) -> None:
        """Look whether the server has emptied idle slots to make room, where it may have done so."""
        is_unsure = any(view.occupancy is not None and not view.is_sure for view in self.table.views())
        if is_unsure or verdict is Verdict.INEFFECTIVE:
            self.probe.glance()

    def _settle(self, run: _Run, response: RelayedResponse) -> Trigger | None:
        """Write down what the answer left in the slot; the checkpoint that it asks for, if any."""
        epoch = run.lease.epoch
        if response.ending is not Ending.COMPLETE:
            self._dropped(run)
            return None
        if self.table.speculates and run.visit.account.tap.ended_with(STALE_DRAFT):
            # Every request that goes on from here would fail as this one did.
            self.table.served(run.slot, epoch, None)
            return None
        if run.visit.account.was_cut_off:
            self._ran_out(run.lease)
            return None
        if response.status >= 400:
            # Refused, too long: the slot and its snapshot are as they were.
            self.table.served(run.slot, epoch, run.before)
            return None
        usage = run.visit.account.usage
        changed = stay_after(run.stay, usage, self.clock.now()) if run.stay else None
        self.table.served(run.slot, epoch, changed, changed.tokens if changed else tokens_after(usage))
        self._measure(run, usage)
        if changed is None:
            return None
        if run.session is not None:
            learn(self.shaper, run.session, run.visit.call.asked, run.before, changed, usage)
        return after_request(self.policy, ends_exchange=usage.finish_reason != "tool_calls")

    def _ran_out(self, lease: Lease) -> None:
        """The server has ended all that ran for want of room, and emptied their slots."""
        self.table.served(lease.slot, lease.epoch, None, tokens=0)
        self.needs.fell_short(lease.want.cells)
        self.shares(lease.epoch, True)

    async def _mend(self, run: _Run, said: bytes) -> bool:
        """Empty the slot after a failure that has no other cure; seen through when the client leaves. Raises
        _RanOut for what others' absence may cure."""
        if OUT_OF_ROOM in said and not run.visit.account.has_begun_again and self._had_company(run):
            raise _RanOut
        if not self.table.speculates or STALE_DRAFT not in said:
            return False
        emptying = self.holder.tasks.spawn(self.preparer.empty(run.lease), name="empty a slot")
        if not await asyncio.shield(emptying):
            return False
        run.visit.account.emptied()
        return True

    def _had_company(self, run: _Run) -> bool:
        """Whether others ran beside it, or failed as it did meanwhile. Alone it would only fail again."""
        others = (view for view in self.table.views() if view.id != run.lease.slot)
        return self.needs.shortfalls > run.shortfalls or any(view.state in UNDER_WAY for view in others)

    def _measure(self, run: _Run, usage: Usage) -> None:
        """Remember how many tokens its bytes were, for those that come after it."""
        call, prompt = run.visit.call, usage.prompt
        if prompt is None:
            return
        measure = Measure(len(call.body), prompt)
        self.needs.learn(measure, usage.generated, call.answer_limit)
        if run.session is not None:
            run.session.measure = measure

    def _dropped(self, run: _Run) -> None:
        """The server may go on with it: the slot is nobody's until it was seen idle."""
        visit = run.visit
        settling = Settling(
            run.slot, was_seen=visit.account.was_seen_running, body_bytes=len(visit.call.body)
        )
        self.table.broke_off(run.slot, run.lease.epoch, settling)
        self.probe.want()

    def _end(self, run: _Run, after: Trigger | None) -> None:
        if not run.lease.is_void:
            stay = self.table.occupancy(run.slot)
            if run.session is not None:
                remember(run.session, stay)
            is_loose = self.moorings.are_needed and self.table.view(run.slot).state is SlotState.RESIDENT
            if is_loose and stay is not None:
                self.holder.tasks.spawn(self._moor(run.lease, stay), name="moor a session")
                return
            if after is not None:
                self.holder.tasks.spawn(
                    self._checkpoint(run.lease, after), name=f"checkpoint after a {after}"
                )
                return
        self.holder.release(run.lease)

    async def _moor(self, lease: Lease, stay: Occupancy) -> None:
        try:
            await self.holder.desk.until_located()
            await self.moorings.moor(lease.slot, lease.epoch, stay)
        finally:
            self.holder.release(lease)

    async def _checkpoint(self, lease: Lease, trigger: Trigger) -> None:
        try:
            # The server saw the slot idle when the answer ended, and may just be putting another in it.
            await self.holder.desk.until_located()
            await self.checkpointer.save(lease.slot, lease.epoch, trigger)
        finally:
            self.holder.release(lease)
