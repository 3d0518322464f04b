"""Requests pinned to one slot: prepare it, run, and write down what the answer left in it."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.boundary.continuations import ending_of
from kvproxy.boundary.turn import Turn
from kvproxy.checkpoint.checkpointer import Checkpointer
from kvproxy.checkpoint.outcome import Preparation, Trigger
from kvproxy.checkpoint.policy import CheckpointPolicy, after_request
from kvproxy.checkpoint.preparer import Preparer
from kvproxy.checkpoint.shaper import Shaper
from kvproxy.clock import Clock
from kvproxy.errors import InvariantError, ReplyError, UpstreamError
from kvproxy.identifiers import Revision
from kvproxy.proxy.holding import Holder
from kvproxy.proxy.relay import Ending, RelayedResponse
from kvproxy.proxy.rewrite import splice
from kvproxy.proxy.sending import Sender
from kvproxy.proxy.visit import Visit
from kvproxy.sessions.session import Session
from kvproxy.slots.leases import Lease, Purpose, Want
from kvproxy.slots.settling import Settling
from kvproxy.slots.slot import Occupancy
from kvproxy.slots.table import SlotTable
from kvproxy.upstream.probe import Probe
from kvproxy.upstream.replies import Usage
from kvproxy.upstream.volatility import Volatility


@dataclass(frozen=True, slots=True)
class _Run:
    """A request about to be sent. `before` is the slot's occupancy as prepared, `stay` the one to be."""

    visit: Visit
    lease: Lease
    session: Session | None
    before: Occupancy | None
    stay: Occupancy | None


@dataclass(frozen=True, slots=True)
class PinnedRequests:
    table: SlotTable
    holder: Holder
    sender: Sender
    preparer: Preparer
    checkpointer: Checkpointer
    shaper: Shaper
    probe: Probe
    volatility: Volatility
    policy: CheckpointPolicy
    clock: Clock

    async def serve(self, visit: Visit, session: Session | None) -> RelayedResponse | None:
        """The answer; None if the server became another one before the request was sent."""
        want = Want(Purpose.PINNED, session.key if session else None)
        lease = await self.holder.acquire(want, visit.account)
        if lease is None:
            return None
        preparation: Preparation | ReplyError | None = self.preparer.at_once(lease, session)
        if preparation is None:
            preparation = await self.holder.see_through(lease, self._prepare(lease, session))
        if isinstance(preparation, ReplyError):
            self.holder.release(lease)
            raise preparation
        if lease.is_void:
            self.holder.release(lease)
            return None
        before = self.table.view(lease.slot).occupancy
        visit.account.prepared(
            visit.shown(preparation), session, lease.slot, before.tokens if before else None
        )
        return await self._run(_Run(visit, lease, session, before, before or _new_stay(session, lease)))

    async def _prepare(self, lease: Lease, session: Session | None) -> Preparation | ReplyError:
        preparation = await self.preparer.prepare(lease, session)
        # It took a while. A server that is another one by now may have fewer slots, and would run the
        # request in one of them that is in use.
        await self.holder.watch.confirm()
        return preparation

    async def _run(self, run: _Run) -> RelayedResponse:
        """The request itself. Whatever happens, the slot is settled and the lease has one end."""
        call, lease, began = run.visit.call, run.lease, self.clock.now()
        self.table.serve(lease.slot, lease.epoch, run.stay)
        self.holder.desk.reconsider()
        after: Trigger | None = None
        try:
            body = splice(call.body, lease.slot, cache_prompt=call.is_owner)
            if body is None:
                raise InvariantError("a body that cannot be spliced was to be pinned")
            response = await self.sender.send(run.visit, body, lambda: self.holder.desk.launched(lease))
            after = self._settle(run, response)
        except UpstreamError as error:
            if error.was_sent:
                self._dropped(run)
            else:
                self.table.served(lease.slot, lease.epoch, run.before)
            raise
        except BaseException:
            self._dropped(run)
            raise
        finally:
            self._end(run, after)
        self.volatility.request_ended(lease.slots[0], began)
        run.visit.account.done(response)
        return response

    def _settle(self, run: _Run, response: RelayedResponse) -> Trigger | None:
        """Write down what the answer left in the slot; the checkpoint that it asks for, if any."""
        lease = run.lease
        if response.ending is not Ending.COMPLETE:
            self._dropped(run)
            return None
        if response.status >= 400:
            # Refused, too long: the slot and its snapshot are as they were.
            self.table.served(lease.slot, lease.epoch, run.before)
            return None
        usage = run.visit.account.usage
        generated = usage.generated or 0
        # The last token was sampled, but never computed: it is not in the slot.
        tokens = None if usage.prompt is None else usage.prompt + max(0, generated - 1)
        computed = (usage.computed or 0) + generated
        changed = run.stay.changed(self.clock.now(), tokens, computed) if run.stay else None
        self.table.served(lease.slot, lease.epoch, changed)
        if changed is None:
            return None
        self._learn(run, changed, usage)
        return after_request(self.policy, ends_exchange=usage.finish_reason != "tool_calls")

    def _learn(self, run: _Run, stay: Occupancy, usage: Usage) -> None:
        """Remember what a snapshot in the right form will need to be made, and what this answer showed."""
        session = run.session
        if session is None:
            return
        if run.before is not None:
            self.shaper.observe(session, run.before, usage.prompt, usage.reused)
        session.turn = None
        if session.asked is not None:
            session.turn = Turn(session.asked, ending_of(usage.finish_reason), usage.prompt, stay.revision)

    def _dropped(self, run: _Run) -> None:
        """The server may go on with it: the slot is nobody's until it was seen idle."""
        visit, lease = run.visit, run.lease
        settling = Settling(
            lease.slot, was_seen=visit.account.was_seen_running, body_bytes=len(visit.call.body)
        )
        self.table.broke_off(lease.slot, lease.epoch, settling)
        self.probe.want()

    def _end(self, run: _Run, after: Trigger | None) -> None:
        if not run.lease.is_void:
            self._remember(run)
            if after is not None:
                self.holder.tasks.spawn(
                    self._checkpoint(run.lease, after), name=f"checkpoint after a {after}"
                )
                return
        self.holder.release(run.lease)

    def _remember(self, run: _Run) -> None:
        session = run.session
        if session is None or run.lease.is_fork:
            return
        session.requests += 1
        session.was_resident, session.lost_to_restart = True, False
        occupancy = self.table.view(run.lease.slot).occupancy
        if occupancy is not None:
            session.revision = Revision(max(session.revision, occupancy.revision))

    async def _checkpoint(self, lease: Lease, trigger: Trigger) -> None:
        try:
            # The server saw the slot idle when the answer ended, and may just be putting another in it.
            await self.holder.desk.until_located()
            await self.checkpointer.save(lease.slot, lease.epoch, trigger)
        finally:
            self.holder.release(lease)


def _new_stay(session: Session | None, lease: Lease) -> Occupancy | None:
    if session is None or lease.is_fork:
        return None
    return Occupancy(session.key, session.revision, session.revision)
