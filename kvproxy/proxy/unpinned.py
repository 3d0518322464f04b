"""Requests whose slot the server chooses: under a lease of all free slots until it was seen where they run,
or of all slots, to their end, if they may use several.

A request of a conversation *adopts* the slot it took: what it leaves there is the conversation's, as any
pinned answer is. Of `/v1/messages` the slot is foreseen (`steering`); that of a conversation that is adrift
only the server can find.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.checkpoint.outcome import Outcome, Preparation, Reason, Verdict
from kvproxy.checkpoint.policy import after_request
from kvproxy.dialects.endpoints import Reach
from kvproxy.errors import InvariantError, ReplyError, UpstreamError
from kvproxy.identifiers import SlotId
from kvproxy.proxy.lessons import learn
from kvproxy.proxy.pinned import PinnedRequests
from kvproxy.proxy.recogniser import Owner
from kvproxy.proxy.relay import Ending, RelayedResponse
from kvproxy.proxy.rewrite import splice
from kvproxy.proxy.stays import new_stay, remember, stay_after, tokens_after
from kvproxy.proxy.steering import NOWHERE, Aim, Steering
from kvproxy.proxy.visit import Visit
from kvproxy.sessions.session import Session
from kvproxy.slots.leases import Lease, Purpose, Want
from kvproxy.slots.slot import Occupancy
from kvproxy.upstream.probe import Flight

ANY_SLOT = SlotId(-1)
"""What `id_slot` says where the server is to choose."""


@dataclass(frozen=True, slots=True)
class _Run:
    """An unpinned request about to be sent."""

    visit: Visit
    aim: Aim
    flight: Flight

    @property
    def session(self) -> Session | None:
        """Whose the slot will be, None for nobody's."""
        return self.aim.session


@dataclass(frozen=True, slots=True)
class UnpinnedRequests:
    p: PinnedRequests
    """Requests of both kinds are served with the same parts."""
    steering: Steering

    async def serve(self, visit: Visit) -> RelayedResponse | None:
        """The answer; None if the server became another one before the request was sent."""
        call = visit.call
        purpose = Purpose.FLOATING if call.reach is Reach.FLOATING else Purpose.EXCLUSIVE
        lease = await self.p.holder.acquire(self._want(visit, purpose, None), visit)
        return None if lease is None else await self._launch(visit, lease, None)

    async def serve_steered(self, visit: Visit, owner: Owner) -> RelayedResponse | None:
        """The same for a request of a conversation, whose slot is foreseen."""
        lease = await self.p.holder.acquire(self._want(visit, Purpose.FLOATING, owner.session), visit)
        return None if lease is None else await self._launch(visit, lease, owner)

    async def serve_adrift(self, visit: Visit, owner: Owner) -> RelayedResponse | None:
        """The answer to a request of a session whose newest work only the server can find; None if it has to
        begin again."""
        session = owner.session
        lease = await self.p.holder.acquire(self._want(visit, Purpose.FLOATING, session), visit)
        if lease is None:
            return None
        if not self.p.moorings.is_adrift(session.key):  # another request of it was quicker
            self.p.holder.release(lease)
            return None
        return await self._launch(visit, lease, owner)

    def _want(self, visit: Visit, purpose: Purpose, session: Session | None) -> Want:
        call, key = visit.call, session.key if session else None
        need = self.p.needs.of(len(call.body), call.answer_limit, None, self.p.table.pool)
        return Want(purpose, key, need.thought, need.at_worst)

    async def _launch(self, visit: Visit, lease: Lease, owner: Owner | None) -> RelayedResponse | None:
        ready = await self.p.holder.see_through(lease, visit.vigil, self._make_ready(visit, lease, owner))
        if isinstance(ready, ReplyError) or lease.is_void:
            self.p.holder.release(lease)
            if isinstance(ready, ReplyError):
                raise ready
            return None
        aim, flight = ready
        flight.stay, flight.expected = aim.stay, aim.slot
        run = _Run(visit, aim, flight)
        self.p.holder.tasks.spawn(self._follow(run), name="follow an unpinned request")
        named = aim.session or (owner.session if owner else None)
        visit.account.prepared(visit.shown(aim.preparation), named, aim.slot, aim.tokens)
        return await self._fly(run)

    # -- before ----------------------------------------------------------------------------------------------

    async def _make_ready(
        self, visit: Visit, lease: Lease, owner: Owner | None
    ) -> tuple[Aim, Flight] | ReplyError:
        """A look at the slots is the last before it is sent, and takes as long as the server likes. Who ended
        meanwhile is saved too, which may run something in their slots: then there is another look."""
        session = None if owner is None else owner.session
        aim = await self._prepare(lease, owner)
        while not isinstance(aim, ReplyError):
            size, leaves_no_trace = len(visit.call.body), visit.call.endpoint.is_management
            flight = await self.p.probe.before_flight(lease, size, leaves_no_trace=leaves_no_trace)
            if not (ended := self.p.holder.desk.widen(lease)):
                return aim, flight
            aim = await self._secure(lease, ended, session) or aim
        return aim

    async def _prepare(self, lease: Lease, owner: Owner | None) -> Aim | ReplyError:
        """Save whoever the server might put the request in the place of, also those who ended meanwhile, and
        bring the conversation to where the server will find it."""
        session = None if owner is None else owner.session
        is_adrift = session is not None and self.p.moorings.is_adrift(session.key)
        refusal = await self._secure(lease, lease.slots, session)
        if refusal is not None or owner is None or session is None:
            return refusal or NOWHERE
        if is_adrift:
            self.p.recogniser.runs_at_home(owner)
            return Aim(Preparation(Outcome.COLD, Reason.EVICTED), session, stay=new_stay(session))
        aim = await self.steering.aim(lease, owner)
        # It took a while: others may have ended since, and the server may be another one.
        await self.p.holder.watch.confirm()
        return await self._secure(lease, self.p.holder.desk.widen(lease), session) or aim

    async def _secure(
        self, lease: Lease, slots: tuple[SlotId, ...], session: Session | None
    ) -> ReplyError | None:
        while True:
            for slot in slots:
                if lease.is_void:
                    return None  # the server is another one, and may have fewer slots
                if session is not None and self.p.table.view(slot).occupant == session.key:
                    continue  # it goes on from there
                refusal = await self.p.preparer.secure(lease, slot)
                if refusal is not None:
                    return refusal
            await self.p.holder.desk.depart(lease)
            slots = self.p.holder.desk.widen(lease)
            if not slots:
                return None

    # -- under way -------------------------------------------------------------------------------------------

    async def _fly(self, run: _Run) -> RelayedResponse:
        visit, flight = run.visit, run.flight
        was_dropped, was_refused, left, tokens, response = True, False, None, None, None
        try:
            response = await self.p.sender.send(visit, self._body(run))
            was_dropped = response.ending is not Ending.COMPLETE
            was_refused = response.status >= 400
            if visit.account.was_cut_off:
                tokens = 0
            elif not was_dropped and not was_refused:
                tokens = tokens_after(visit.account.usage)
                if flight.stay is not None:
                    left = stay_after(flight.stay, visit.account.usage, self.p.clock.now())
        except UpstreamError as error:
            was_dropped = error.was_sent
            raise
        finally:
            if visit.call.endpoint.changes_identity:
                self.p.holder.watch.renew()
            if response is not None and run.session is None:
                visit.account.done(response)
            flight.end(
                was_dropped=was_dropped,
                was_refused=was_refused,
                left=left,
                tokens=tokens,
                done=None if response is None else (lambda: self._judge(run, response)),
            )
        return response

    def _body(self, run: _Run) -> bytes:
        """As it came; one that would be pinned to a slot of the client's choice says that it is not. There
        it could meet another request, or, of several prompts, itself."""
        call = run.visit.call
        if run.session is not None and call.endpoint.reach is Reach.PINNED:
            body = splice(call.body, ANY_SLOT)
            if body is None:
                raise InvariantError("a body that cannot be spliced was to be a session's")
            return body
        unpinned = splice(call.body, ANY_SLOT, cache_prompt=None) if call.may_name_slot else None
        return call.body if unpinned is None else unpinned

    # -- afterwards, in a task of the house ------------------------------------------------------------------

    async def _follow(self, run: _Run) -> None:
        flight = run.flight
        try:
            await self.p.probe.follow(flight)
            if run.session is not None:
                flight.done()
                if not flight.lease.is_void:
                    await self._settle(run, run.session)
        finally:
            self.p.holder.release(flight.lease)
            self.p.probe.want()

    def _judge(self, run: _Run, response: RelayedResponse) -> None:
        """Tell of an answer once it is known where it was computed: what was brought into another slot than
        the server took proves nothing by it."""
        flight, session = run.flight, run.session
        if session is None:
            return
        account = run.visit.account
        if run.aim.computed is not None:
            account.had_computed(run.aim.computed)
        account.ran_in(flight.taken[0] if len(flight.taken) == 1 else None)
        verdict = account.done(response)
        if flight.expected is not None:
            hit = flight.taken == (flight.expected,)
            self.p.proofs.proved(flight.expected, session.key, verdict if hit else Verdict.UNKNOWN)

    async def _settle(self, run: _Run, session: Session) -> None:
        """Write down where the session lives now, and save it where that is not for long, or as set."""
        flight, stay = run.flight, run.aim.stay
        view, left = self.p.table.slot_of(session.key), flight.left
        remember(session, left)
        if view is None:
            if stay is not None and self.p.moorings.are_needed:
                self.p.table.drift(left or stay, flight.lease.epoch)
            return
        if left is None or view.occupancy != left:
            return
        usage = run.visit.account.usage
        met = stay if flight.taken == (flight.expected,) else None
        learn(self.p.shaper, session, run.visit.call.asked, met, left, usage)
        await self._save(view.id, flight, left, ends_exchange=usage.finish_reason != "tool_calls")

    async def _save(self, slot: SlotId, flight: Flight, left: Occupancy, *, ends_exchange: bool) -> None:
        epoch = flight.lease.epoch
        if self.p.moorings.are_needed:
            await self.p.moorings.moor(slot, epoch, left)
        elif (trigger := after_request(self.p.policy, ends_exchange=ends_exchange)) is not None:
            await self.p.checkpointer.save(slot, epoch, trigger)
