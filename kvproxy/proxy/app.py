"""The client face: every request comes in here, and every error of ours goes out here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from kvproxy.dialects.endpoints import Endpoint, Reach, classify
from kvproxy.errors import CapacityError, ErrorCode, ReplyError
from kvproxy.identifiers import ServerName
from kvproxy.proxy.account import refusal
from kvproxy.proxy.call import Call, Terms, receive
from kvproxy.proxy.envelope import error_response
from kvproxy.proxy.exchange import Exchange
from kvproxy.proxy.guard import check_host, forbidden, origin_form
from kvproxy.telemetry.events import Emit

Admin = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]
"""The operator's face: answers a request for the given path."""

ADMIN_PREFIX = "/kvproxy"
METRICS_PATH = "/metrics"
ALWAYS_ANSWERED = ("/kvproxy/healthz", "/kvproxy/readyz")


@dataclass(frozen=True, slots=True)
class FaceParts:
    server: ServerName
    exchange: Exchange
    admin: Admin
    emit: Emit
    allowed_hosts: tuple[str, ...]
    allows_management: bool
    has_api_keys: bool
    """Then the server's slots are shown to nobody: they hold other users' prompts."""
    terms: Terms
    is_draining: Callable[[], bool]
    needs_documents: Callable[[], bool]
    """Whether the bodies of requests are of use after they were sent."""


class ClientFace:
    """The handler of all requests."""

    def __init__(self, parts: FaceParts) -> None:
        self._p = parts
        self._running = 0
        self._ended = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._running += 1
        try:
            return await self._handle(request)
        finally:
            self._running -= 1
            self._ended.set()

    async def until_idle(self) -> None:
        """Wait until no request is being answered."""
        while self._running:
            self._ended.clear()
            await self._ended.wait()

    @property
    def running(self) -> int:
        """How many requests are being answered."""
        return self._running

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        target = origin_form(request.raw_path)
        path = target.path_and_query.partition("?")[0]
        if path in ALWAYS_ANSWERED:
            return await self._p.admin(request, path)
        endpoint = classify(request.method, path)
        try:
            self._check(request, target.authority)
            if path == METRICS_PATH or path == ADMIN_PREFIX or path.startswith(f"{ADMIN_PREFIX}/"):
                return await self._p.admin(request, path)
            call = await self._admit(request, endpoint, path)
            if call is None:
                return await self._p.exchange.pass_by(request)
        except ReplyError as error:
            self._p.emit(refusal(self._p.server, endpoint.label, error))
            return error_response(endpoint.dialect, error)
        try:
            return await self._p.exchange.serve(request, call)
        except ReplyError as error:  # the exchange has told of it
            return error_response(endpoint.dialect, error)

    async def _admit(self, request: web.BaseRequest, endpoint: Endpoint, path: str) -> Call | None:
        """The request, read; None for one that runs no inference and may stream through."""
        is_closed = forbidden(request.method, path, has_api_keys=self._p.has_api_keys)
        if is_closed and not self._p.allows_management:
            raise ReplyError(
                ErrorCode.ROUTE_FORBIDDEN,
                f"{path} manages the server and is closed to clients (security.allow_management opens it)",
                status=403,
            )
        if endpoint.reach is Reach.NONE:
            return None
        if self._p.is_draining():
            raise CapacityError(ErrorCode.DRAINING, "kvproxy is shutting down", retry_after_seconds=5)
        return await receive(
            request,
            endpoint,
            self._p.terms,
            keeps_document=self._p.needs_documents(),
        )

    def _check(self, request: web.BaseRequest, authority: str | None) -> None:
        host = authority if authority is not None else request.headers.get("Host")
        if not check_host(host, self._p.allowed_hosts):
            raise ReplyError(
                ErrorCode.HOST_FORBIDDEN,
                _no_such_host(host),
                status=403,
            )


def _no_such_host(host: str | None) -> str:
    if host is None:  # HTTP/1.1 without Host is no HTTP; HTTP/1.0 may leave it out
        return "the request has no Host header: send one, or use HTTP/1.1, which always does"
    return f"requests for the host {host!r} are not answered (security.allowed_hosts)"
