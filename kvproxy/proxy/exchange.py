"""One request, from arrival to release, at one server.

    receive -> confirm who the server is -> lease -> prepare the slot -> splice -> send -> relay -> settle

Every request that may run inference holds a lease while it does (`pinned`, `unpinned`). What must outlive the
client (a save or restore under way, a dropped request that the server still runs, a checkpoint of a finished
turn) is handed with its lease to a task of the house.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from aiohttp import web

from kvproxy.checkpoint.outcome import Outcome, Preparation, Reason
from kvproxy.clock import Clock
from kvproxy.dialects.endpoints import Reach
from kvproxy.errors import ErrorCode, NotPinned, ReplyError, UpstreamError
from kvproxy.identifiers import ServerName
from kvproxy.proxy.account import Account
from kvproxy.proxy.call import Call
from kvproxy.proxy.holding import Holder, require_slots
from kvproxy.proxy.pinned import PinnedRequests
from kvproxy.proxy.recogniser import Owner, Recogniser
from kvproxy.proxy.sending import Sender
from kvproxy.proxy.sorter import Sorter
from kvproxy.proxy.unpinned import UnpinnedRequests
from kvproxy.proxy.vigil import Vigil, Watchers
from kvproxy.proxy.visit import Visit
from kvproxy.sessions.branches import Look
from kvproxy.telemetry.events import Emit
from kvproxy.upstream.facts import Facts, PersistenceMode, ServerState

MAX_LIVES = 3
"""How many lives of the server one request may see pass while it waits, before it is sent away."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Serves the requests of one server."""

    server: ServerName
    holder: Holder
    sender: Sender
    pinned: PinnedRequests
    unpinned: UnpinnedRequests
    sorter: Sorter
    watchers: Watchers
    recogniser: Recogniser
    clock: Clock
    emit: Emit
    is_ending: Callable[[], bool]
    """Whether the time to drain is over: what still runs is cut off by us."""

    async def serve(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        """The answer to a request that may run inference. Raises ReplyError where we answer instead."""
        account = Account(self.server, call, self.clock, self.emit, self.clock.now())
        vigil = Vigil(self.watchers, request, call)
        try:
            return await self._serve(Visit(request, call, account, vigil))
        except ReplyError as error:
            account.refused(error)
            if vigil.begun is None:
                raise
            return await vigil.refuse(error)
        except asyncio.CancelledError:
            if self.is_ending():
                account.cut_off(ErrorCode.DRAINING)
            account.client_left()
            raise
        finally:
            vigil.end()
            if vigil.session is not None:
                vigil.session.answered(call.document)

    async def pass_by(self, request: web.BaseRequest) -> web.StreamResponse:
        """A request that runs no inference: body and answer stream through."""
        return await self.sender.pass_by(request)

    async def _serve(self, visit: Visit) -> web.StreamResponse:
        for _ in range(MAX_LIVES):
            facts = await self.holder.watch.confirm()
            if facts.state is ServerState.LOADING or (not facts.pins and facts.state.has_slots):
                return await self._stray(visit, facts)
            require_slots(self.holder.watch, facts)
            try:
                response = await self._hold(visit, facts)
            except NotPinned:
                continue
            if response is not None:
                return response
        message = "llama-server restarts again and again"
        raise UpstreamError(message, status=503, retry_after_seconds=5, was_sent=False)

    async def _hold(self, visit: Visit, facts: Facts) -> web.StreamResponse | None:
        look = self.recogniser.look(visit.call, facts.model)
        visit = self.sorter.sorted(visit, continues=look is not None and look.is_known)
        if visit.call.may_float and facts.persistence.mode is PersistenceMode.OFF:
            # Pinned it could only lose: the server's own memory of prompts is for those it places itself.
            visit = replace(visit, call=visit.call.anonymous())
        if facts.pins_messages and visit.call.endpoint.has_turns:
            visit = replace(visit, call=visit.call.pinned())
        if visit.call.reach is Reach.PINNED:
            owner = self._owner(visit, facts, look)
            if owner is not None and self.pinned.moorings.is_adrift(owner.session.key):
                return await self.unpinned.serve_adrift(visit, owner)
            return await self.pinned.serve(visit, owner)
        if visit.call.reach is Reach.FLOATING and visit.call.endpoint.has_turns:
            owner = self._owner(visit, facts, look)
            if owner is not None:
                return await self.unpinned.serve_steered(visit, owner)
        return await self.unpinned.serve(visit)

    def _owner(self, visit: Visit, facts: Facts, look: Look | None) -> Owner | None:
        owner = self.recogniser.owner_of(visit.call, facts.model, look)
        visit.vigil.session = None if owner is None else owner.session
        return owner

    async def _stray(self, visit: Visit, facts: Facts) -> web.StreamResponse:
        """To a server whose slots we do not choose, or that is not ready and will say so itself."""
        visit.account.prepared(Preparation(Outcome.COLD, Reason.PERSISTENCE_OFF), None, None, None)
        desk = self.holder.desk
        if not facts.pins:
            # Not before the last pinned request is over: an unpinned one could meet it in its slot.
            visit.vigil.waits()
            await desk.until_all_returned()
        desk.stray_began()
        try:
            response = await self.sender.send(visit, visit.call.body)
        finally:
            desk.stray_ended()
        visit.account.done(response)
        return response
