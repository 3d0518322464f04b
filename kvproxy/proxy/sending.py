"""Sends requests to one server and relays its answers, and tells the watch what that showed of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web

from kvproxy.dialects.patience import failure_of_answer
from kvproxy.errors import UpstreamError
from kvproxy.proxy.account import WRITE_STALL
from kvproxy.proxy.guard import origin_form
from kvproxy.proxy.headers import upstream_headers
from kvproxy.proxy.receive import stream_body
from kvproxy.proxy.relay import Ending, RelayedResponse, relay
from kvproxy.proxy.visit import Visit
from kvproxy.slots.leases import LeaseDesk
from kvproxy.upstream.transport import READ_ERRORS, Transport, UpstreamAnswer
from kvproxy.upstream.watch import Watch

Mend = Callable[[bytes], Awaitable[bool]]
"""Asked with the body of an error 500, of which the client has seen nothing yet: True if its cause is gone
and the request is to be sent once more."""

MAX_ERROR_BYTES = 16 << 10
EVENT_STREAM = "text/event-stream"
EXPOSE = "Access-Control-Expose-Headers"


@dataclass(frozen=True, slots=True)
class WriteStall:
    """A client that does not read is cut off only while others wait for what it holds."""

    seconds: float
    desk: LeaseDesk

    def applies(self) -> bool:
        return self.desk.waiting > 0


@dataclass(frozen=True, slots=True)
class Sender:
    transport: Transport
    watch: Watch
    stall: WriteStall
    api_key: str | None
    shows_headers: bool
    max_body_bytes: int

    async def pass_by(self, request: web.BaseRequest) -> RelayedResponse:
        """A request that runs no inference: body and answer stream through."""
        body = stream_body(request, self.max_body_bytes)
        upstream = await self.transport.send(request.method, request.raw_path, self._headers(request), body)
        return await relay(request, upstream, extra_headers={})

    async def send(
        self,
        visit: Visit,
        body: bytes,
        on_headers: Callable[[], None] = lambda: None,
        mend: Mend | None = None,
    ) -> RelayedResponse:
        """Raises UpstreamError if no answer began; one that broke off later is told by its `ending`.
        `on_headers` is called when the server's came."""
        request, account = visit.request, visit.account
        account.sent()
        visit.vigil.sent()
        upstream, said = await self._begin(request, body), b""
        account.headers_came()
        on_headers()
        if mend is not None and upstream.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            said = await _read_error(upstream)
            try:
                is_mended = await mend(said)
            except BaseException:
                upstream.close()
                raise
            if is_mended:
                upstream.close()
                upstream, said = await self._begin(request, body), b""
        if (begun := visit.vigil.begun) is not None:
            said = said or await self._first_word(upstream)
            visit.vigil.end()
            if not _is_stream(upstream):
                return await self._tell(visit, upstream, said)
        response = await relay(
            request,
            upstream,
            extra_headers=(
                _exposed(account.headers(), request, upstream) if self.shows_headers and begun is None else {}
            ),
            tap=account.tap,
            stall=self.stall,
            on_stall=lambda: account.cut_off(WRITE_STALL),
            said=said,
            begun=begun,
            is_told=lambda: account.is_told,
        )
        if response.ending is Ending.UPSTREAM_BROKE:
            self.watch.suspect()
        elif response.ending is Ending.COMPLETE:
            self.watch.confirmed()
        return response

    async def _first_word(self, upstream: UpstreamAnswer) -> bytes:
        """The first of the body; the client is kept waiting until then. Raises UpstreamError if none comes:
        of an answer that we began, its client can still be told what happened."""
        try:
            return await upstream.content.readany()
        except READ_ERRORS as error:
            upstream.close()
            self.watch.suspect()
            raise UpstreamError(f"the upstream broke off before it answered: {error}") from error

    async def _tell(self, visit: Visit, upstream: UpstreamAnswer, said: bytes) -> RelayedResponse:
        """Tell inside the stream that we began what the server answered instead of one."""
        said += await _read_error(upstream)
        upstream.close()
        self.watch.confirmed()
        return await visit.vigil.fail(failure_of_answer(upstream.status, said))

    async def _begin(self, request: web.BaseRequest, body: bytes) -> UpstreamAnswer:
        try:
            return await self.transport.send(request.method, request.raw_path, self._headers(request), body)
        except UpstreamError:
            self.watch.suspect()
            raise

    def _headers(self, request: web.BaseRequest) -> list[tuple[bytes, bytes]]:
        return upstream_headers(
            request.raw_headers,
            peer=request.remote,
            scheme=request.scheme,
            host=origin_form(request.raw_path).authority or request.headers.get("Host"),
            api_key=self.api_key,
        )


def _is_stream(upstream: UpstreamAnswer) -> bool:
    encoding = upstream.header(b"content-encoding") or "identity"
    kind = (upstream.header(b"content-type") or "").partition(";")[0].strip().lower()
    return upstream.status == HTTPStatus.OK and kind == EVENT_STREAM and encoding.lower() == "identity"


def _exposed(own: dict[str, str], request: web.BaseRequest, upstream: UpstreamAnswer) -> dict[str, str]:
    """Our headers, with the one by which a browser lets its page read them."""
    if own and "Origin" in request.headers:
        before = upstream.header(EXPOSE.lower().encode())
        own[EXPOSE] = ", ".join([*([before] if before else []), *own])
    return own


async def _read_error(upstream: UpstreamAnswer) -> bytes:
    """The beginning of an error's body, which is all of it for one that is llama-server's."""
    said = b""
    try:
        while len(said) < MAX_ERROR_BYTES and (piece := await upstream.content.readany()):
            said += piece
    except READ_ERRORS:
        # It broke off; the relay meets the same error and tells the client.
        return said
    return said
