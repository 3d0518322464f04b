"""Connections to one server, kept between requests: aiohttp's client protocol without its client.

The protocol parses answers, holds back a server that sends faster than we read, and knows whether a
connection may carry another request. What its client builds around each request (a session, a request, a
response, a connector) costs a quarter of what a resident request pays in all, and we use none of it.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections import deque

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

from kvproxy.clock import Clock

IDLE_SECONDS = 3.0
"""llama-server closes an idle connection after 5 s. We give it up well before, so that no request meets
the close half-way."""
HEADER_BYTES = 1 << 16
HEADER_COUNT = 512


class Connection(ResponseHandler):
    """One connection, and what a request on it has to know.

    `is_used` is True once it was given to a request; `is_outdated` when it must not carry another.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.is_used = False
        self.is_outdated = False
        self.idle_since = 0.0
        self._body: StreamReader | None = None
        self._poll: select.poll | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=0)  # uvloop then writes at once, not at the turn's end
        sock = transport.get_extra_info("socket")
        if sock is not None and hasattr(select, "poll"):  # Windows: the idle limit alone has to do
            self._poll = select.poll()
            self._poll.register(sock.fileno(), select.POLLIN)

    def connection_lost(self, exc: BaseException | None) -> None:
        """After a malformed chunk the library closes the connection and tells everybody but the reader of
        the body, who would wait for ever."""
        self._poll = None
        super().connection_lost(exc)
        body, self._body = self._body, None
        if body is not None and not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError("the connection was lost in the body"))

    def expect_answer(self, *, has_body: bool) -> None:
        """To be called before a request is written. `has_body` is False for the answer to HEAD."""
        self.is_used = True
        self.set_response_params(
            skip_payload=not has_body,
            read_until_eof=True,
            auto_decompress=False,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            max_headers=HEADER_COUNT,
        )

    async def answer(self) -> tuple[RawResponseMessage, StreamReader]:
        """The next answer that is final, its head read. Raises aiohttp's errors, also for what nobody asked
        for and no client could read, and what `set_exception` was given."""
        message, body = await self.read()
        while 100 <= message.code < 200 and message.code != 101:
            message, body = await self.read()
        if message.code == 101:
            raise aiohttp.ClientPayloadError("it changes to another protocol, which nobody asked for")
        coding = message.headers.get("Transfer-Encoding")
        if coding is not None and coding.strip().lower() != "chunked":
            raise aiohttp.ClientPayloadError(f"its transfer coding is {coding!r}, which nobody asked for")
        self._body = body
        return message, body

    @property
    def may_carry_another(self) -> bool:
        """Whether nothing is known against one more request, short of asking the socket."""
        return self.is_connected() and not self.should_close and not self.is_outdated

    @property
    def has_news(self) -> bool:
        """Whether the socket is readable, which before a request means that the server is done with it: the
        event loop may not have seen the close yet."""
        return self._poll is not None and bool(self._poll.poll(0))


class ConnectionPool:
    """All connections to one address. Make it inside a running loop."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, clock: Clock) -> None:
        self._address = host, port
        self._tls = tls
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._idle: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def take(self) -> Connection | None:
        """An idle connection on which nothing was written that the server could have missed; None if there
        is none."""
        while self._idle:
            connection = self._idle.pop()
            is_fresh = self._clock.now() - connection.idle_since <= IDLE_SECONDS
            if is_fresh and connection.may_carry_another and not connection.has_news:
                return connection
            self.drop(connection)
        return None

    async def connect(self, timeout_seconds: float) -> Connection:
        """A new connection. Raises OSError, ssl.SSLError or TimeoutError."""
        host, port = self._address
        async with asyncio.timeout(timeout_seconds):
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._loop),
                host,
                port,
                ssl=self._tls,
                server_hostname=host if self._tls is not None else None,
            )
        self._all.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """After an answer was read to its end."""
        if not connection.may_carry_another:
            self.drop(connection)
            return
        connection.idle_since = self._clock.now()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(IDLE_SECONDS, self._close_idle)

    def drop(self, connection: Connection) -> None:
        """Close it; what was written to it before still goes out."""
        self._all.discard(connection)
        connection.close()

    def abort(self, connection: Connection) -> None:
        """Close it now, whatever is still to be written."""
        self._all.discard(connection)
        connection.abort()

    def outdate(self) -> None:
        """Use none of the present connections for another request."""
        for connection in self._all:
            connection.is_outdated = True

    def _close_idle(self) -> None:
        self._sweep = None
        while self._idle and self._clock.now() - self._idle[0].idle_since > IDLE_SECONDS:
            self.drop(self._idle.popleft())
        if self._idle:
            left = IDLE_SECONDS - (self._clock.now() - self._idle[0].idle_since)
            self._sweep = self._loop.call_later(max(left, 0.1), self._close_idle)

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        self._idle.clear()
        closing = [closed for c in self._all if (closed := c.closed) is not None]
        for connection in tuple(self._all):
            self.drop(connection)
        if closing:
            await asyncio.wait(closing, timeout=1.0)
        for closed in closing:
            if closed.done() and not closed.cancelled():
                closed.exception()
