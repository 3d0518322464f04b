"""One request, from arrival to release, at one server.

    receive -> confirm who the server is -> lease -> prepare the slot -> splice -> send -> relay -> settle

Every request that may run inference holds a lease while it does. What must outlive the client (a save or
restore under way, a dropped request that the server still runs, a checkpoint of a finished turn) is handed
with its lease to a task of the house.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from multidict import CIMultiDict

from kvproxy.checkpoint.checkpointer import Checkpointer
from kvproxy.checkpoint.outcome import Outcome, Preparation, Reason, Trigger
from kvproxy.checkpoint.policy import CheckpointPolicy, after_request
from kvproxy.checkpoint.preparer import Preparer
from kvproxy.clock import Clock
from kvproxy.errors import NotPinned, ReplyError, UpstreamError
from kvproxy.identifiers import Revision, ServerName, SlotId, short
from kvproxy.proxy.account import Account
from kvproxy.proxy.call import Call
from kvproxy.proxy.endpoints import Reach
from kvproxy.proxy.headers import upstream_headers
from kvproxy.proxy.relay import Ending, RelayedResponse, relay
from kvproxy.proxy.rewrite import splice
from kvproxy.sessions.key import derive_key
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.sessions.session import Session
from kvproxy.slots.leases import Lease, LeaseDesk, Purpose, Want
from kvproxy.slots.settling import Settling
from kvproxy.slots.slot import Occupancy
from kvproxy.slots.table import SlotTable
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Emit, SlotAcquired, SlotReleased
from kvproxy.upstream.facts import Facts, ServerState
from kvproxy.upstream.probe import Flight, Probe
from kvproxy.upstream.transport import Transport
from kvproxy.upstream.volatility import Volatility
from kvproxy.upstream.watch import Watch

T = TypeVar("T")

MAX_LIVES = 3
"""How many lives of the server one request may see pass while it waits, before it is sent away."""


@dataclass(frozen=True, slots=True)
class ExchangeParts:
    server: ServerName
    api_key: str | None
    transport: Transport
    table: SlotTable
    desk: LeaseDesk
    watch: Watch
    volatility: Volatility
    probe: Probe
    preparer: Preparer
    checkpointer: Checkpointer
    registry: SessionRegistry
    policy: CheckpointPolicy
    tasks: TaskSet
    clock: Clock
    emit: Emit
    shows_headers: bool
    write_stall_seconds: float


@dataclass(frozen=True, slots=True)
class WriteStall:
    """A client that does not read is cut off only while others wait for what it holds."""

    seconds: float
    desk: LeaseDesk

    def applies(self) -> bool:
        return self.desk.waiting > 0


class Exchange:
    """Serves the requests of one server."""

    def __init__(self, parts: ExchangeParts) -> None:
        self._p = parts
        self._stall = WriteStall(parts.write_stall_seconds, parts.desk)

    async def serve(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        """The answer to a request that may run inference. Raises ReplyError where we answer instead."""
        account = Account(self._p.server, call, self._p.clock, self._p.emit, self._p.clock.now())
        try:
            return await self._serve(request, call, account)
        except ReplyError as error:
            account.refused(error)
            raise
        except asyncio.CancelledError:
            account.client_left()
            raise

    async def pass_by(self, request: web.BaseRequest) -> web.StreamResponse:
        """A request that runs no inference: body and answer stream through."""
        body = request.content.iter_any() if request.can_read_body else None
        upstream = await self._p.transport.send(request.method, request.raw_path, self.headers(request), body)
        return await relay(request, upstream, extra_headers={})

    async def _serve(self, request: web.BaseRequest, call: Call, account: Account) -> web.StreamResponse:
        for _ in range(MAX_LIVES):
            facts = await self._p.watch.confirm()
            if facts.state is ServerState.LOADING or (facts.state.has_slots and not facts.pins):
                return await self._stray(request, call, account, facts)
            _require(facts)
            try:
                if call.reach is Reach.PINNED:
                    response = await self._pinned(request, call, account, facts)
                else:
                    response = await self._unpinned(request, call, account)
            except NotPinned:
                continue
            if response is not None:
                return response
        raise UpstreamError("llama-server restarts again and again", status=503, retry_after_seconds=5)

    # -- without a slot of ours ----------------------------------------------------------------------

    async def _stray(
        self, request: web.BaseRequest, call: Call, account: Account, facts: Facts
    ) -> web.StreamResponse:
        """To a server whose slots we do not choose, or that is not ready and will say so itself."""
        account.prepared(Preparation(Outcome.COLD, Reason.PERSISTENCE_OFF), None, None, None)
        if not facts.pins:
            # Not before the last pinned request is over: an unpinned one could meet it in its slot.
            await self._p.desk.until_all_returned()
        self._p.desk.stray_began()
        try:
            response = await self._send(request, call.body, account)
        finally:
            self._p.desk.stray_ended()
        account.done(response)
        return response

    async def _unpinned(
        self, request: web.BaseRequest, call: Call, account: Account
    ) -> web.StreamResponse | None:
        """Under a lease of all free slots until it was seen where it runs; of all if it needs several."""
        purpose = Purpose.FLOATING if call.reach is Reach.FLOATING else Purpose.EXCLUSIVE
        lease = await self._acquire(Want(purpose), account)
        if lease is None:
            return None
        refusal = await self._see_through(lease, self._secure(lease))
        if refusal is not None or lease.is_void:
            lease.release()
            if refusal is not None:
                raise refusal
            return None
        look = self._p.probe.before_flight(lease, len(call.body), leaves_no_trace=call.endpoint.is_management)
        flight = await self._see_through(lease, look)
        self._p.tasks.spawn(self._p.probe.follow(flight), name="follow an unpinned request")
        account.prepared(_shown(Preparation(Outcome.COLD), call), None, None, None)
        return await self._fly(request, call, account, flight)

    async def _fly(
        self, request: web.BaseRequest, call: Call, account: Account, flight: Flight
    ) -> web.StreamResponse:
        was_dropped = True
        try:
            response = await self._send(request, call.body, account)
            was_dropped = response.ending is not Ending.COMPLETE
        except UpstreamError as error:
            was_dropped = error.was_sent
            raise
        finally:
            flight.end(was_dropped=was_dropped)
        account.done(response)
        return response

    async def _secure(self, lease: Lease) -> ReplyError | None:
        """Save whoever the server might put the request in the place of."""
        for slot in lease.slots:
            refusal = await self._p.preparer.secure(lease, slot)
            if refusal is not None:
                return refusal
        return None

    # -- pinned --------------------------------------------------------------------------------------

    async def _pinned(
        self, request: web.BaseRequest, call: Call, account: Account, facts: Facts
    ) -> web.StreamResponse | None:
        session = self._session(call, facts)
        lease = await self._acquire(Want(Purpose.PINNED, session.key if session else None), account)
        if lease is None:
            return None
        preparation: Preparation | ReplyError | None = self._p.preparer.at_once(lease, session)
        if preparation is None:
            preparation = await self._see_through(lease, self._prepare(lease, session))
        if isinstance(preparation, ReplyError) or lease.is_void:
            self._release(lease)
            if isinstance(preparation, ReplyError):
                raise preparation
            return None
        before = self._p.table.view(lease.slot).occupancy
        stored = before.tokens if before else None
        account.prepared(_shown(preparation, call), session, lease.slot, stored)
        return await self._run(request, call, account, lease, session)

    async def _prepare(self, lease: Lease, session: Session | None) -> Preparation | ReplyError:
        preparation = await self._p.preparer.prepare(lease, session)
        # It took a while. A server that is another one by now may have fewer slots, and would run the
        # request in one of them that is in use.
        await self._p.watch.confirm()
        return preparation

    async def _run(
        self, request: web.BaseRequest, call: Call, account: Account, lease: Lease, session: Session | None
    ) -> web.StreamResponse:
        """The request itself. Whatever happens, the slot is settled and the lease has one end."""
        before = self._p.table.view(lease.slot).occupancy
        stay = before or self._new_stay(session, lease)
        began = self._p.clock.now()
        self._p.table.serve(lease.slot, lease.epoch, stay)
        self._p.desk.reconsider()
        after: Trigger | None = None
        try:
            body = splice(call.body, lease.slot, cache_prompt=call.is_owner)
            response = await self._send(request, body, account)
            after = self._settle(call, account, lease, stay, before, response)
        except UpstreamError as error:
            if error.was_sent:
                self._dropped(call, account, lease)
            else:
                self._p.table.served(lease.slot, lease.epoch, before)
            raise
        except BaseException:
            self._dropped(call, account, lease)
            raise
        finally:
            self._end(lease, session, after)
        self._p.volatility.request_ended(lease.slots[0], began)
        account.done(response)
        return response

    def _new_stay(self, session: Session | None, lease: Lease) -> Occupancy | None:
        if session is None or lease.is_fork:
            return None
        return Occupancy(session.key, session.revision, session.revision)

    def _settle(
        self,
        call: Call,
        account: Account,
        lease: Lease,
        stay: Occupancy | None,
        before: Occupancy | None,
        response: RelayedResponse,
    ) -> Trigger | None:
        """Write down what the answer left in the slot; the checkpoint that it asks for, if any."""
        if response.ending is not Ending.COMPLETE:
            self._dropped(call, account, lease)
            return None
        if response.status >= 400:
            # Refused, too long: the slot and its snapshot are as they were.
            self._p.table.served(lease.slot, lease.epoch, before)
            return None
        usage = account.usage
        generated = usage.generated or 0
        # The last token was sampled, but never computed: it is not in the slot.
        tokens = None if usage.prompt is None else usage.prompt + max(0, generated - 1)
        computed = (usage.computed or 0) + generated
        changed = stay.changed(self._p.clock.now(), tokens, computed) if stay else None
        self._p.table.served(lease.slot, lease.epoch, changed)
        if changed is None:
            return None
        return after_request(self._p.policy, ends_exchange=usage.finish_reason != "tool_calls")

    def _dropped(self, call: Call, account: Account, lease: Lease) -> None:
        """The server may go on with it: the slot is nobody's until it was seen idle."""
        settling = Settling(lease.slot, was_seen=account.was_seen_running, body_bytes=len(call.body))
        self._p.table.broke_off(lease.slot, lease.epoch, settling)
        self._p.probe.want()

    def _end(self, lease: Lease, session: Session | None, after: Trigger | None) -> None:
        if session is not None and not lease.is_fork and not lease.is_void:
            self._remember(lease, session)
        if after is not None and not lease.is_void:
            self._p.tasks.spawn(self._checkpoint(lease, after), name=f"checkpoint after a {after}")
        else:
            self._release(lease)

    def _remember(self, lease: Lease, session: Session) -> None:
        session.requests += 1
        session.was_resident, session.lost_to_restart = True, False
        occupancy = self._p.table.view(lease.slot).occupancy
        if occupancy is not None:
            session.revision = Revision(max(session.revision, occupancy.revision))

    async def _checkpoint(self, lease: Lease, trigger: Trigger) -> None:
        try:
            await self._p.checkpointer.save(lease.slot, lease.epoch, trigger)
        finally:
            self._release(lease)

    # -- shared --------------------------------------------------------------------------------------

    async def _acquire(self, want: Want, account: Account) -> Lease | None:
        """A lease on a server that was asked, after any wait, whether it is still the same."""
        account.asks()
        lease = await self._p.desk.acquire(want)
        try:
            facts = await self._p.watch.confirm()
            _require(facts)
        except BaseException:
            lease.release()
            raise
        if lease.is_void or not facts.pins:
            lease.release()
            return None
        slot, name = _named(lease)
        self._p.emit(SlotAcquired(self._p.server, slot, name, want.purpose, lease.waited_seconds))
        return lease

    def _release(self, lease: Lease) -> None:
        slot, name = _named(lease)
        lease.release()
        self._p.emit(SlotReleased(self._p.server, slot, name, lease.want.purpose))

    async def _see_through(self, lease: Lease, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` under `lease`. If it fails, or the client leaves and it has been finished all the same,
        the lease is given back here."""
        task = self._p.tasks.spawn(work, name="prepare a slot")
        try:
            return await asyncio.shield(task)
        except BaseException:
            task.add_done_callback(lambda _: self._release(lease))
            raise

    async def _send(self, request: web.BaseRequest, body: bytes | None, account: Account) -> RelayedResponse:
        account.sent()
        try:
            upstream = await self._p.transport.send(
                request.method, request.raw_path, self.headers(request), body
            )
        except UpstreamError:
            self._p.watch.suspect()
            raise
        account.headers_came()
        response = await relay(
            request,
            upstream,
            extra_headers=account.headers() if self._p.shows_headers else {},
            tap=account.tap,
            stall=self._stall,
        )
        if response.ending is Ending.UPSTREAM_BROKE:
            self._p.watch.suspect()
        elif response.ending is Ending.COMPLETE:
            self._p.watch.confirmed()
        return response

    def headers(self, request: web.BaseRequest) -> CIMultiDict[str]:
        """The request's headers as the server gets them. Raises ReplyError (508) for a loop."""
        return upstream_headers(
            request.raw_headers,
            peer=request.remote,
            scheme=request.scheme,
            host=request.headers.get("Host"),
            api_key=self._p.api_key,
        )

    def _session(self, call: Call, facts: Facts) -> Session | None:
        if not call.is_owner or call.client is None:
            return None
        key = derive_key(self._p.server, "", facts.model, call.client)
        session = self._p.registry.touch(key, call.client.digest, facts.model)
        session.may_persist = session.may_persist and call.may_persist
        session.opening = call.opening
        return session


def _named(lease: Lease) -> tuple[SlotId | None, str | None]:
    """A lease's slot and session as events name them."""
    slot = lease.slots[0] if len(lease.slots) == 1 else None
    return slot, short(lease.want.session) if lease.want.session else None


def _require(facts: Facts) -> None:
    if not facts.state.has_slots:
        raise UpstreamError(
            f"llama-server is {facts.state}: {facts.reason}", status=503, retry_after_seconds=1
        )


def _shown(preparation: Preparation, call: Call) -> Preparation:
    """What a request that owns nothing is told: that it is one, not how cold it is."""
    if call.is_bypass:
        return Preparation(Outcome.BYPASS)
    return Preparation(Outcome.AUXILIARY) if call.is_auxiliary else preparation
