"""The way to the upstream: one pool of connections that neither adds, decodes nor follows anything.

A request is sent once. It is sent again only where it provably never left: the server had closed the
pooled connection, and that was seen before the first byte was written.
"""

from __future__ import annotations

import asyncio
import select
from asyncio import Future
from collections.abc import AsyncIterable, AsyncIterator
from weakref import WeakSet

import aiohttp
from aiohttp import web
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from multidict import CIMultiDict
from yarl import URL

from kvproxy.errors import ReplyError, UpstreamError
from kvproxy.proxy.guard import origin_form
from kvproxy.upstream.facts import cannot_be_reached
from kvproxy.upstream.unreachable import why

CONNECT_TIMEOUT_SECONDS = 5.0
IDLE_SECONDS = 3.0
"""llama-server closes an idle connection after 5 s. We give it up well before, so that no request meets
the close half-way."""
LARGE_BODY_BYTES = 1 << 20
SLICE_BYTES = 1 << 16
HEADER_BYTES = 1 << 16
HEADER_COUNT = 512

_NEVER_INVENTED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

Body = bytes | AsyncIterator[bytes] | None


class _StaleConnection(Exception):
    """This pooled connection is of no use any more, and nothing of the request was written to it."""


class _Ledger:
    """Which connections carried a request before, and which of those must not carry another."""

    def __init__(self) -> None:
        self._used: WeakSet[ResponseHandler] = WeakSet()
        self._outdated: WeakSet[ResponseHandler] = WeakSet()

    def admit(self, conn: Connection) -> None:
        """Raises _StaleConnection for a pooled connection that is outdated or that the server has closed."""
        protocol = conn.protocol
        if protocol is None:
            raise _StaleConnection
        if protocol in self._used and (protocol in self._outdated or _has_news(conn.transport)):
            raise _StaleConnection
        if protocol not in self._used and (closed := protocol.closed) is not None:
            closed.add_done_callback(_look_away)
        self._used.add(protocol)

    def outdate(self) -> None:
        self._outdated.update(self._used)


def _look_away(closed: Future[None]) -> None:
    """Whoever asks for the future of the close owes it a look, or asyncio complains of an unread error."""
    if not closed.cancelled():
        closed.exception()


def _fail_with_connection(response: aiohttp.ClientResponse) -> None:
    """Let the body fail if its connection is lost: after a malformed chunk the HTTP library closes the
    connection and tells everybody but the reader of the body, who would wait for ever."""
    content, connection = response.content, response.connection
    protocol = connection.protocol if connection is not None else None
    closed = protocol.closed if protocol is not None else None
    if closed is None or content.is_eof():
        return

    def fail(_: Future[None]) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection was lost in the body"))

    def forget() -> None:
        closed.remove_done_callback(fail)

    closed.add_done_callback(fail)
    content.on_eof(forget)


def _careful_request(ledger: _Ledger) -> type[aiohttp.ClientRequest]:
    class CarefulRequest(aiohttp.ClientRequest):
        """Looks whether the server has hung up before the first byte is written.

        The event loop may not have seen the close yet; the socket knows. After the first byte nobody can
        tell whether the server acted on the request.
        """

        async def send(self, conn: Connection) -> aiohttp.ClientResponse:
            ledger.admit(conn)
            return await super().send(conn)

    return CarefulRequest


class _CarefulResponse(aiohttp.ClientResponse):
    """A connection that carried a body in chunks carries nothing more.

    llama-server hangs up after each streamed answer, without having said so. A request that follows at once
    is written before the close arrives, and nobody can tell then whether it was taken up.
    """

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        protocol = connection.protocol
        response = await super().start(connection)
        if protocol is not None and "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            if self.connection is None:  # read to its end already, and back in the pool
                protocol.close()
            else:
                protocol.force_close()
        return response


def _has_news(transport: asyncio.BaseTransport | None) -> bool:
    """Whether the socket is readable, which before a request means that the other side is done with it."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.fileno() < 0:
        return True
    if not hasattr(select, "poll"):  # Windows: the idle limit alone has to do
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


class Transport:
    """Requests to one upstream, `base_url` being scheme, host and port. Make it inside a running loop."""

    def __init__(self, base_url: str, *, connect_timeout: float = CONNECT_TIMEOUT_SECONDS) -> None:
        self._base = URL(base_url).origin()
        self._connect_timeout = connect_timeout
        self._ledger = _Ledger()
        self._session = self._open()

    def __repr__(self) -> str:
        return f"<Transport {self._base}>"

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NEVER_INVENTED,
            trust_env=False,
            raise_for_status=False,
            # No limit but the one on connecting: a queued request gets no byte for as long as it waits.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout, sock_read=None),
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            max_headers=HEADER_COUNT,
            request_class=_careful_request(self._ledger),
            response_class=_CarefulResponse,
        )

    async def send(
        self, method: str, raw_path: str, headers: CIMultiDict[str], body: Body
    ) -> aiohttp.ClientResponse:
        """The response with its headers read; its body is the caller's to read and to close.

        `raw_path` is the target as it was asked for; path and query are sent byte for byte. Raises
        UpstreamError: 503 if no connection could be made, 502 if it broke before the headers came; and
        what reading the body raised.
        """
        while True:  # each turn takes one connection out of the pool, and a new one is never stale
            try:
                return await self._send(method, raw_path, headers, body)
            except _StaleConnection:
                continue

    async def _send(
        self, method: str, raw_path: str, headers: CIMultiDict[str], body: Body
    ) -> aiohttp.ClientResponse:
        data, fields = _payload(headers, body)
        try:
            response = await self._session.request(
                method, self._url(raw_path), headers=fields, data=data, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UpstreamError(
                cannot_be_reached(str(self._base), why(error)),
                status=503,
                retry_after_seconds=1,
                was_sent=False,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__, ReplyError | web.RequestPayloadError):
                raise error.__cause__ from None
            raise UpstreamError(f"the upstream broke off before it answered: {error}") from error
        _fail_with_connection(response)
        return response

    def _url(self, raw_path: str) -> URL:
        # As a path that is not looked into; parsed as a URL, an empty query would lose its `?`.
        base, path = self._base, origin_form(raw_path).path_and_query
        return URL.build(scheme=base.scheme, host=base.host or "", port=base.port, path=path, encoded=True)

    def drop_idle(self) -> None:
        """Use none of the present connections for another request: the server behind them is gone."""
        self._ledger.outdate()

    async def close(self) -> None:
        await self._session.close()


def _payload(
    headers: CIMultiDict[str], body: Body
) -> tuple[bytes | AsyncIterable[bytes] | AsyncIterable[memoryview] | None, CIMultiDict[str]]:
    """The body as the HTTP library takes it, and headers that state its length where it is known."""
    fields = _with_uniform_names(headers)
    if not isinstance(body, bytes) or (not body and "Content-Length" not in fields):
        return body or None, fields
    fields["Content-Length"] = str(len(body))
    return (_slices(body) if len(body) > LARGE_BODY_BYTES else body), fields


def _with_uniform_names(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    """Of two fields whose names differ only in case, the HTTP library would send the second alone."""
    names: dict[str, str] = {}
    return CIMultiDict((names.setdefault(name.lower(), name), value) for name, value in headers.items())


async def _slices(body: bytes) -> AsyncIterator[memoryview]:
    """Written whole, a large body would be copied into the transport's buffer at one go."""
    view = memoryview(body)
    for start in range(0, len(view), SLICE_BYTES):
        yield view[start : start + SLICE_BYTES]
