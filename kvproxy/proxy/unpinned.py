"""Requests whose slot the server chooses: under a lease of all free slots until it was seen where they run,
or of all slots, to their end, if they may use several.

A request of a session that is adrift *adopts* the slot it took: what it leaves there is the session's, and
is saved at the end as any other answer is.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.checkpoint.mooring import Moorings
from kvproxy.checkpoint.outcome import Outcome, Preparation, Reason
from kvproxy.checkpoint.preparer import Preparer
from kvproxy.clock import Clock
from kvproxy.dialects.endpoints import Reach
from kvproxy.errors import InvariantError, ReplyError, UpstreamError
from kvproxy.identifiers import SlotId
from kvproxy.proxy.holding import Holder
from kvproxy.proxy.recogniser import Owner, Recogniser
from kvproxy.proxy.relay import Ending, RelayedResponse
from kvproxy.proxy.rewrite import splice
from kvproxy.proxy.sending import Sender
from kvproxy.proxy.stays import new_stay, remember, stay_after
from kvproxy.proxy.visit import Visit
from kvproxy.sessions.session import Session
from kvproxy.slots.leases import Lease, Purpose, Want
from kvproxy.slots.slot import Occupancy
from kvproxy.slots.table import SlotTable
from kvproxy.upstream.probe import Flight, Probe

ANY_SLOT = SlotId(-1)
"""What `id_slot` says where the server is to choose."""


@dataclass(frozen=True, slots=True)
class UnpinnedRequests:
    holder: Holder
    sender: Sender
    preparer: Preparer
    probe: Probe
    table: SlotTable
    moorings: Moorings
    recogniser: Recogniser
    clock: Clock

    async def serve(self, visit: Visit) -> RelayedResponse | None:
        """The answer; None if the server became another one before the request was sent."""
        call = visit.call
        purpose = Purpose.FLOATING if call.reach is Reach.FLOATING else Purpose.EXCLUSIVE
        lease = await self.holder.acquire(Want(purpose), visit.account)
        return None if lease is None else await self._launch(visit, lease, None)

    async def serve_adrift(self, visit: Visit, owner: Owner) -> RelayedResponse | None:
        """The answer to a request of a session whose newest work only the server can find; None if it has to
        begin again."""
        session = owner.session
        lease = await self.holder.acquire(Want(Purpose.FLOATING, session.key), visit.account)
        if lease is None:
            return None
        if not self.moorings.is_adrift(session.key):  # another request of it was quicker
            self.holder.release(lease)
            return None
        self.recogniser.runs_at_home(owner)
        return await self._launch(visit, lease, session)

    async def _launch(self, visit: Visit, lease: Lease, session: Session | None) -> RelayedResponse | None:
        call = visit.call
        refusal = await self.holder.see_through(lease, self._secure(lease))
        if refusal is not None or lease.is_void:
            self.holder.release(lease)
            if refusal is not None:
                raise refusal
            return None
        look = self.probe.before_flight(lease, len(call.body), leaves_no_trace=call.endpoint.is_management)
        flight = await self.holder.see_through(lease, look)
        if session is not None:
            flight.stay = new_stay(session)
        self.holder.tasks.spawn(self._follow(flight, session), name="follow an unpinned request")
        reason = None if session is None else Reason.EVICTED
        visit.account.prepared(visit.shown(Preparation(Outcome.COLD, reason)), session, None, None)
        return await self._fly(visit, flight)

    async def _follow(self, flight: Flight, session: Session | None) -> None:
        try:
            await self.probe.follow(flight)
            if session is not None and flight.stay is not None and not flight.lease.is_void:
                await self._settle(flight, flight.stay, session)
        finally:
            flight.lease.release()
            self.probe.want()

    async def _settle(self, flight: Flight, stay: Occupancy, session: Session) -> None:
        """Write down where the session lives now, and save it if that is not for long."""
        view = self.table.slot_of(session.key)
        remember(session, flight.left)
        if view is None:
            self.table.drift(flight.left or stay, flight.lease.epoch)
        elif flight.left is not None and self.moorings.are_needed:
            await self.moorings.moor(view.id, flight.lease.epoch, flight.left)

    async def _secure(self, lease: Lease) -> ReplyError | None:
        """Save whoever the server might put the request in the place of, also those who ended meanwhile."""
        slots = lease.slots
        while slots:
            for slot in slots:
                refusal = await self.preparer.secure(lease, slot)
                if refusal is not None:
                    return refusal
            await self.holder.desk.depart(lease)
            slots = self.holder.desk.widen(lease)
        return None

    async def _fly(self, visit: Visit, flight: Flight) -> RelayedResponse:
        was_dropped, left = True, None
        try:
            response = await self.sender.send(visit, self._body(visit, flight))
            was_dropped = response.ending is not Ending.COMPLETE
            if flight.stay is not None and not was_dropped and response.status < 400:
                left = stay_after(flight.stay, visit.account.usage, self.clock.now())
        except UpstreamError as error:
            was_dropped = error.was_sent
            raise
        finally:
            if visit.call.endpoint.changes_identity:
                self.holder.watch.renew()
            flight.end(was_dropped=was_dropped, left=left)
        visit.account.done(response)
        return response

    def _body(self, visit: Visit, flight: Flight) -> bytes:
        if flight.stay is None:
            return visit.call.body
        body = splice(visit.call.body, ANY_SLOT)
        if body is None:
            raise InvariantError("a body that cannot be spliced was to be a session's")
        return body
