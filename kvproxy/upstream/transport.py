"""The way to the upstream: one pool of connections that neither adds, decodes nor follows anything.

A request is sent once. It is sent again only where it provably never left: the server had closed the
pooled connection, and that was seen before the first byte was written.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterable
from urllib.parse import SplitResult, urlsplit

import aiohttp
from aiohttp import web
from aiohttp.http import RawResponseMessage, StreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader

from kvproxy.clock import Clock
from kvproxy.errors import ReplyError, UpstreamError
from kvproxy.proxy.guard import origin_form
from kvproxy.tasks import TaskSet
from kvproxy.upstream.connections import Connection, ConnectionPool
from kvproxy.upstream.facts import cannot_be_reached
from kvproxy.upstream.unreachable import why

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_SECONDS = 5.0
LARGE_BODY_BYTES = 1 << 20
SLICE_BYTES = 1 << 16

READ_ERRORS = (aiohttp.ClientError, OSError, HttpProcessingError)
"""What reading an answer may raise."""

_DEFAULT_PORTS = {"http": 80, "https": 443}

Body = bytes | AsyncIterator[bytes] | None

Fields = Iterable[tuple[bytes, bytes]]
"""Header fields as they stand on the wire."""


class UpstreamAnswer:
    """An answer whose head was read. `content` is its body, to be read to the end or closed."""

    __slots__ = ("_connection", "_pool", "_writing", "content", "is_whole", "raw_headers", "reason", "status")

    def __init__(
        self,
        message: RawResponseMessage,
        content: StreamReader,
        connection: Connection,
        pool: ConnectionPool,
        writing: asyncio.Task[None] | None,
    ) -> None:
        self.status = message.code
        self.reason = message.reason
        self.raw_headers = message.raw_headers
        self.content = content
        self.is_whole = not message.chunked and not message.should_close
        """The server makes the body before it sends the head: the one follows the other at once."""
        self._connection: Connection | None = connection
        self._pool = pool
        self._writing = writing
        if message.chunked:
            # llama-server hangs up after each streamed answer, without having said so. A request that
            # follows at once is written before the close arrives, and nobody can tell if it was taken up.
            connection.force_close()
        content.on_eof(self._release)

    def header(self, name: bytes) -> str | None:
        """The first field called `name`, which is given in lower case."""
        for field, value in self.raw_headers:
            if field.lower() == name:
                return value.decode("latin-1")
        return None

    async def read(self) -> bytes:
        """All of the body."""
        return await self.content.read()

    def close(self) -> None:
        """Of an answer that was not read to its end the connection is closed; else this does nothing."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._writing is not None and not self._writing.done():
            self._writing.cancel()
            self._pool.abort(connection)
        else:
            self._pool.drop(connection)

    def _release(self) -> None:
        if self._connection is None:
            return
        if self._writing is not None and not self._writing.done():
            self.close()  # answered before all of the request was there: the rest goes nowhere
            return
        connection, self._connection = self._connection, None
        self._pool.give_back(connection)


class Transport:
    """Requests to one upstream, `base_url` being scheme, host and port. Make it inside a running loop."""

    def __init__(
        self, base_url: str, clock: Clock, *, connect_timeout: float = CONNECT_TIMEOUT_SECONDS
    ) -> None:
        parts = urlsplit(base_url)
        self._base = f"{parts.scheme}://{parts.netloc}"
        self._host_line = b"Host: %b\r\n" % _authority(parts)
        self._connect_timeout = connect_timeout
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or _DEFAULT_PORTS[parts.scheme]
        self._pool = ConnectionPool(parts.hostname or "", port, tls, clock)
        self._tasks = TaskSet(_log_failure)

    def __repr__(self) -> str:
        return f"<Transport {self._base}>"

    async def send(self, method: str, raw_path: str, fields: Fields, body: Body) -> UpstreamAnswer:
        """The answer with its head read; its body is the caller's to read and to close.

        `raw_path` is the target as it was asked for; path and query are sent byte for byte. Raises
        UpstreamError: 503 if no connection could be made, 502 if it broke before the head came; and what
        reading the body raised.
        """
        head, is_chunked = self._head(method, raw_path, fields, body)
        connection = self._pool.take()
        if connection is None:
            connection = await self._connect()
        writing: asyncio.Task[None] | None = None
        try:
            connection.expect_answer(has_body=method != "HEAD")
            if isinstance(body, bytes) and len(body) <= LARGE_BODY_BYTES:
                _write_whole(connection, head, body)
            elif body is None:
                _write_whole(connection, head, b"")
            else:
                writing = self._tasks.spawn(
                    _write(connection, head, body, is_chunked=is_chunked), name="write a request"
                )
            message, content = await connection.answer()
        except BaseException as error:
            if writing is not None:
                writing.cancel()
            self._pool.abort(connection)
            if isinstance(error, ReplyError | web.RequestPayloadError) or not isinstance(error, READ_ERRORS):
                raise
            raise UpstreamError(f"the upstream broke off before it answered: {error}") from error
        return UpstreamAnswer(message, content, connection, self._pool, writing)

    async def _connect(self) -> Connection:
        try:
            return await self._pool.connect(self._connect_timeout)
        except OSError as error:  # TimeoutError and ssl.SSLError are too
            raise UpstreamError(
                cannot_be_reached(self._base, why(error)),
                status=503,
                retry_after_seconds=1,
                was_sent=False,
            ) from error

    def _head(self, method: str, raw_path: str, fields: Fields, body: Body) -> tuple[bytes, bool]:
        """The head of a request, and whether its body goes in chunks."""
        target = origin_form(raw_path).path_and_query.encode("utf-8", "surrogateescape")
        lines = [b"%b %b HTTP/1.1\r\n" % (method.encode("ascii"), target), self._host_line]
        size = len(body) if isinstance(body, bytes) else None
        has_length = False
        for field in fields:
            name = field[0]
            if len(name) == _LENGTH_CHARS and name.lower() == b"content-length":
                if has_length:
                    continue
                has_length = True
                field = field if size is None else (name, b"%d" % size)
            lines.append(b"%b: %b\r\n" % field)
        if size and not has_length:
            lines.append(b"Content-Length: %d\r\n" % size)
        is_chunked = body is not None and size is None and not has_length
        if is_chunked:
            lines.append(b"Transfer-Encoding: chunked\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a line break inside a header field or a target")
        return head, is_chunked

    def drop_idle(self) -> None:
        """Use none of the present connections for another request: the server behind them is gone."""
        self._pool.outdate()

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._pool.close()


def _log_failure(name: str, error: BaseException) -> None:
    log.error("%s failed", name, exc_info=error)


_LENGTH_CHARS = len("content-length")


def _authority(parts: SplitResult) -> bytes:
    if parts.netloc.isascii():
        return parts.netloc.encode()
    host = (parts.hostname or "").encode("idna")
    return host if parts.port is None else b"%b:%d" % (host, parts.port)


def _write_whole(connection: Connection, head: bytes, body: bytes) -> None:
    transport = connection.transport
    if transport is None:
        raise aiohttp.ClientConnectionError("the connection is lost")
    transport.write(head + body)


async def _write(
    connection: Connection, head: bytes, body: bytes | AsyncIterator[bytes], *, is_chunked: bool
) -> None:
    """A body that is long, or not there yet, at the server's pace, while its answer may begin already.

    What reading the body raises ends the wait for the answer.
    """
    try:
        writer = StreamWriter(connection, asyncio.get_running_loop())
        _write_whole(connection, head, b"")
        if is_chunked:
            writer.enable_chunking()
        async for piece in _slices(body) if isinstance(body, bytes) else body:
            await writer.write(piece)
            await writer.drain()
        await writer.write_eof()
    except (aiohttp.ClientError, OSError) as error:
        if connection.exception() is None and connection.is_connected():
            connection.set_exception(aiohttp.ClientOSError(f"could not be written: {error}"))
    except Exception as error:
        connection.set_exception(error)


async def _slices(body: bytes) -> AsyncIterator[memoryview]:
    """Written whole, a large body would be copied into the transport's buffer at one go."""
    view = memoryview(body)
    for start in range(0, len(view), SLICE_BYTES):
        yield view[start : start + SLICE_BYTES]
