"""Requests whose slot the server chooses: under a lease of all free slots until it was seen where they run,
or of all slots, to their end, if they may use several."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.checkpoint.outcome import Outcome, Preparation
from kvproxy.checkpoint.preparer import Preparer
from kvproxy.errors import ReplyError, UpstreamError
from kvproxy.proxy.endpoints import Reach
from kvproxy.proxy.holding import Holder
from kvproxy.proxy.relay import Ending, RelayedResponse
from kvproxy.proxy.sending import Sender
from kvproxy.proxy.visit import Visit
from kvproxy.slots.leases import Lease, Purpose, Want
from kvproxy.upstream.probe import Flight, Probe


@dataclass(frozen=True, slots=True)
class UnpinnedRequests:
    holder: Holder
    sender: Sender
    preparer: Preparer
    probe: Probe

    async def serve(self, visit: Visit) -> RelayedResponse | None:
        """The answer; None if the server became another one before the request was sent."""
        call = visit.call
        purpose = Purpose.FLOATING if call.reach is Reach.FLOATING else Purpose.EXCLUSIVE
        lease = await self.holder.acquire(Want(purpose), visit.account)
        if lease is None:
            return None
        refusal = await self.holder.see_through(lease, self._secure(lease))
        if refusal is not None or lease.is_void:
            self.holder.release(lease)
            if refusal is not None:
                raise refusal
            return None
        look = self.probe.before_flight(lease, len(call.body), leaves_no_trace=call.endpoint.is_management)
        flight = await self.holder.see_through(lease, look)
        self.holder.tasks.spawn(self.probe.follow(flight), name="follow an unpinned request")
        visit.account.prepared(visit.shown(Preparation(Outcome.COLD)), None, None, None)
        return await self._fly(visit, flight)

    async def _secure(self, lease: Lease) -> ReplyError | None:
        """Save whoever the server might put the request in the place of, also those who ended meanwhile."""
        slots = lease.slots
        while slots:
            for slot in slots:
                refusal = await self.preparer.secure(lease, slot)
                if refusal is not None:
                    return refusal
            slots = self.holder.desk.widen(lease)
        return None

    async def _fly(self, visit: Visit, flight: Flight) -> RelayedResponse:
        was_dropped = True
        try:
            response = await self.sender.send(visit, visit.call.body)
            was_dropped = response.ending is not Ending.COMPLETE
        except UpstreamError as error:
            was_dropped = error.was_sent
            raise
        finally:
            if visit.call.endpoint.changes_identity:
                self.holder.watch.renew()
            flight.end(was_dropped=was_dropped)
        visit.account.done(response)
        return response
