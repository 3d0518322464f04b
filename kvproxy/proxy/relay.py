"""Response bytes from the upstream to the client: untouched, as they come, at the client's pace.

Three things must never happen here. An answer that broke must not look complete: the client's connection is
cut without the end of the message. A client that left must not keep the upstream busy: the upstream
connection is closed, not given back half-read. A slow client must not fill our memory: the upstream is read
only as fast as the client reads.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Protocol

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from kvproxy.proxy.headers import client_headers
from kvproxy.proxy.tap import Tap
from kvproxy.upstream.transport import READ_ERRORS, UpstreamAnswer

HOLD_SECONDS = 0.005
"""How long a head waits for a body that follows at once. llama-server writes the two one after the other."""
_NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER on, zero seconds: the close is a reset, and what is still buffered is dropped."""


class Stall(Protocol):
    """How long a client may stop reading while others wait."""

    @property
    def seconds(self) -> float: ...

    def applies(self) -> bool:
        """Whether somebody waits for what this client holds."""


class Ending(StrEnum):
    """How a relayed answer ended."""

    COMPLETE = "complete"
    UPSTREAM_BROKE = "upstream_broke"
    CLIENT_LEFT = "client_left"


class RelayedResponse(web.StreamResponse):
    """An answer whose head is exactly what it was given: no Date, Server or Content-Type of our own.

    `ending` is set when the body has ended, one way or another. `holds_head` sends the head together with
    the first of the body, for an answer whose body follows at once: one write, and one less turn for the
    client.
    """

    def __init__(
        self, *, status: int, reason: str, headers: CIMultiDict[str], holds_head: bool = False
    ) -> None:
        super().__init__(status=status, reason=reason, headers=headers)
        self._holds_head = holds_head
        self.ending: Ending | None = None
        self._request: web.BaseRequest | None = None
        self._writer: AbstractStreamWriter | None = None
        self._stays_open = False
        self._is_delimited = True
        self._hold: asyncio.TimerHandle | None = None

    @property
    def prepared(self) -> bool:
        return self._writer is not None

    @property
    def keep_alive(self) -> bool:
        return self._stays_open

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        """Send the head. The server calls it once more at the end, which does nothing."""
        if self._writer is None:
            self._request, self._writer = request, (writer := request.writer)
            self._frame(request, writer)
            version = request.version
            line = f"HTTP/{version.major}.{version.minor} {self.status} {self.reason}"
            await writer.write_headers(line, self.headers)
            if self._holds_head:
                self._hold = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._send_head)
            else:
                writer.send_headers()
        return self._writer

    def _send_head(self) -> None:
        """The body was not there at once after all."""
        transport = self._request.transport if self._request is not None else None
        if self._writer is not None and transport is not None and not transport.is_closing():
            self._writer.send_headers()

    def _release_head(self) -> None:
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None

    def _frame(self, request: web.BaseRequest, writer: AbstractStreamWriter) -> None:
        """Say where the body ends: by its length, by chunks, or for HTTP/1.0 by the end of the connection."""
        is_modern = request.version >= aiohttp.HttpVersion11
        has_length = "Content-Length" in self.headers
        if has_body(request.method, self.status) and not has_length:
            if is_modern:
                writer.enable_chunking()
                self.headers["Transfer-Encoding"] = "chunked"
            else:
                self._is_delimited = False
        self._stays_open = bool(request.keep_alive) and self._is_delimited
        if self._stays_open and not is_modern:
            self.headers["Connection"] = "keep-alive"
        elif not self._stays_open and is_modern:
            self.headers["Connection"] = "close"

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Returns when the client has taken enough. Raises ConnectionError if it is gone."""
        writer = self._started()
        self._release_head()
        await writer.write(data)
        await writer.drain()

    async def write_eof(self, data: bytes = b"") -> None:
        """End the message; if it broke, leave it without an end."""
        if self.ending is not None:  # the server ends each answer once more
            return
        writer = self._started()
        self._release_head()
        await writer.write_eof(data)
        self.ending = Ending.COMPLETE

    def break_off(self, ending: Ending) -> None:
        """Cut the client's connection so that it cannot take what came for the whole answer.

        Without length or chunks only a reset says so; with them a plain close does, and lets what was
        written before reach the client.
        """
        if self._hold is not None:
            self._release_head()
            self._send_head()
        self.ending = ending
        self._stays_open = False
        transport = self._request.transport if self._request is not None else None
        if transport is None:
            return
        if self._is_delimited:
            transport.close()
        else:
            reset(transport)

    def _started(self) -> AbstractStreamWriter:
        if self._writer is None:
            raise RuntimeError("the head was not sent")
        return self._writer


def has_body(method: str, status: int) -> bool:
    """Whether a response to `method` carries a body (RFC 9110 6.4.1)."""
    return method != "HEAD" and status not in (204, 304) and status >= 200


def reset(transport: asyncio.Transport) -> None:
    """Close at once with a TCP reset, whatever is still to be written."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


async def relay(
    request: web.BaseRequest,
    upstream: UpstreamAnswer,
    *,
    extra_headers: Mapping[str, str],
    tap: Tap | None = None,
    on_headers: Callable[[], None] | None = None,
    stall: Stall | None = None,
    on_stall: Callable[[], None] = lambda: None,
    said: bytes = b"",
    begun: RelayedResponse | None = None,
    is_told: Callable[[], bool] = lambda: False,
) -> RelayedResponse:
    """The whole of one answer; the result is what the request handler returns. `said` is what was read of its
    body before, `begun` the answer if its head was sent before: then it goes on with the body.

    `on_headers` is called when the head has been written, `on_stall` before a client is cut off for not
    reading. Closes `upstream` unless it was read to its end. A client that leaves while we read ends this by
    cancellation; but `is_told` says whether the answer had told its end by then. To many clients nothing
    that comes after is worth waiting for, so that answer is complete.
    """
    response = begun or _response_to(upstream, extra_headers)
    if tap is not None:
        tap.begin(upstream.header(b"content-encoding"))
    watch = _StallWatch(request, stall, on_stall) if stall is not None else None
    try:
        if await _send_head(request, response):
            if on_headers is not None:
                on_headers()
            await _send_body(upstream, response, tap, watch or _NOT_WATCHED, said, is_told)
    finally:
        if watch is not None:
            watch.stop()
        upstream.close()
    return response


def _response_to(upstream: UpstreamAnswer, extra_headers: Mapping[str, str]) -> RelayedResponse:
    response = RelayedResponse(
        status=upstream.status,
        reason=upstream.reason or "",
        headers=client_headers(upstream.raw_headers),
        holds_head=upstream.is_whole,
    )
    response.headers.update(extra_headers)
    return response


class _StallWatch:
    """Cuts off a client that blocks one write for longer than `stall` allows while others wait.

    One timer per answer, not one per write; the write that is cut then ends by cancellation or error.
    """

    def __init__(self, request: web.BaseRequest, stall: Stall, on_stall: Callable[[], None]) -> None:
        self._request = request
        self._stall = stall
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(stall.seconds, self._look)

    def __enter__(self) -> None:
        self._since = self._loop.time()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        blocked = 0.0 if self._since is None else self._loop.time() - self._since
        transport = self._request.transport
        if blocked >= self._stall.seconds and transport is not None and self._stall.applies():
            self._on_stall()
            reset(transport)
            return
        due = self._stall.seconds - blocked
        self._timer = self._loop.call_later(due if due > 0 else self._stall.seconds, self._look)


_NOT_WATCHED: AbstractContextManager[None] = nullcontext()


async def _send_head(request: web.BaseRequest, response: RelayedResponse) -> bool:
    try:
        await response.prepare(request)
    except ConnectionError:
        response.break_off(Ending.CLIENT_LEFT)
        return False
    return True


async def _send_body(
    upstream: UpstreamAnswer,
    response: RelayedResponse,
    tap: Tap | None,
    watch: AbstractContextManager[None],
    said: bytes,
    is_told: Callable[[], bool],
) -> None:
    content = upstream.content
    while True:
        try:
            chunk, said = said or await content.readany(), b""
        except READ_ERRORS:
            response.break_off(Ending.UPSTREAM_BROKE)
            return
        except asyncio.CancelledError:
            if not is_told():
                raise
            _take_back_cancellation()
            response.break_off(Ending.COMPLETE)
            return
        try:
            if tap is not None and chunk:
                tap.feed(chunk)
            with watch:
                if not chunk or content.at_eof():
                    await response.write_eof(chunk)
                    return
                await response.write(chunk)
        except ConnectionError:
            response.break_off(Ending.COMPLETE if is_told() else Ending.CLIENT_LEFT)
            return


def _take_back_cancellation() -> None:
    """It came too late: the task goes on as if it had not been cancelled."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
