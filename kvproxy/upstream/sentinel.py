"""A connection of our own that breaks when llama-server dies, milliseconds after it does.

llama-server closes an idle connection after 5 s and any after 100 requests, so a question is put every few
seconds and the line is changed in time. A break is a hint, not a proof: whoever hears of it asks `/props`.
"""

from __future__ import annotations

import asyncio
import re
import ssl as tls
from collections.abc import Callable
from typing import cast

from kvproxy.clock import Clock

REQUESTS_PER_LINE = 90
CONNECT_SECONDS = 2.0
SILENT_INTERVALS = 4
"""A line that leaves a question unanswered this long is given up: a machine that vanished sends no end."""
MIN_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 1.0
MAX_HEAD_BYTES = 4096

_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")


class Sentinel:
    """Watches the server at `host`:`port` while `run` runs.

    `on_break` is called when the connection breaks unannounced, or cannot be made again after an announced
    end; once, until there is a connection again. `on_connect` is called for each connection made while there
    was none: about once a second while the server loads. Both must neither raise nor block.
    """

    def __init__(
        self,
        host: str,
        port: int,
        ssl: tls.SSLContext | None,
        *,
        api_key: str | None,
        on_break: Callable[[], None],
        on_connect: Callable[[], None],
        clock: Clock,
        interval_seconds: float = 3.0,
    ) -> None:
        self._host = host
        self._port = port
        self._ssl = ssl
        self._question = _question(host, port, api_key)
        self._on_break = on_break
        self._on_connect = on_connect
        self._clock = clock
        self._interval = interval_seconds
        self._line: _Line | None = None
        self._held = False
        self._pause = MIN_PAUSE_SECONDS
        self._closed = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether a connection stands now."""
        return self._line is not None

    async def run(self) -> None:
        """Hold a connection, for ever or until `close`."""
        try:
            while not self._closed.is_set():
                if await self._connect():
                    await self._keep()
                await self._rest()
        finally:
            self.close()

    def close(self) -> None:
        """Let the connection go; nobody is called from here on."""
        self._closed.set()
        self._leave()

    async def _keep(self) -> None:
        """Ask and wait, until there is no line."""
        while (line := self._line) is not None:
            if line.asked >= REQUESTS_PER_LINE and await self._connect():
                continue
            if line.is_silent(self._clock.now(), SILENT_INTERVALS * self._interval):
                self._lost(line)
                line.abandon()
                return
            line.ask(self._clock.now())
            await line.wait(self._interval)
            if line.answers > 1:  # one is not enough: a gateway may end each line after its answer
                self._pause = MIN_PAUSE_SECONDS

    async def _connect(self) -> bool:
        """Make a line, then let the one before it go: there is no moment without."""
        try:
            line = await self._dial()
        except OSError:  # refused, no route, unknown host, timed out, TLS: they all mean that nobody is there
            if self._line is None:
                self._tell_break()
            return False
        if self._closed.is_set():
            line.abandon()
            return False
        self._take(line)
        return True

    async def _dial(self) -> _Line:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, line = await asyncio.get_running_loop().create_connection(
                lambda: _Line(self._question, self._lost), self._host, self._port, ssl=self._ssl
            )
        return line

    def _take(self, line: _Line) -> None:
        had_line = self._line is not None
        self._leave()
        self._line = line
        self._held = True
        if not had_line:
            self._on_connect()
        if line.is_lost:  # already, before it was ours
            self._lost(line)

    def _leave(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.abandon()

    def _lost(self, line: _Line) -> None:
        if line is not self._line:
            return
        self._line = None
        if not line.ends_announced:
            self._tell_break()

    def _tell_break(self) -> None:
        if self._held and not self._closed.is_set():
            self._held = False
            self._on_break()

    async def _rest(self) -> None:
        pause, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE_SECONDS)
        try:
            async with asyncio.timeout(pause):
                await self._closed.wait()
        except TimeoutError:
            return


class _Line(asyncio.Protocol):
    """One connection. A question is written whole and only when the one before it was answered: a request
    that llama-server has half received makes its SIGTERM hang."""

    def __init__(self, question: bytes, on_lost: Callable[[_Line], None]) -> None:
        self._question = question
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._gone = asyncio.Event()
        self._unanswered_since: float | None = None
        self._head = b""
        self.asked = 0
        self.answers = 0
        self.ends_announced = False

    @property
    def is_lost(self) -> bool:
        return self._gone.is_set()

    def is_silent(self, now: float, seconds: float) -> bool:
        """Whether a question has waited longer than `seconds`."""
        return self._unanswered_since is not None and now - self._unanswered_since > seconds

    def ask(self, now: float) -> None:
        if self._transport is None or self._unanswered_since is not None:
            return
        self._unanswered_since = now
        self._head = b""
        self.asked += 1
        self._transport.write(self._question)

    async def wait(self, seconds: float) -> None:
        """Until the line is lost, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._gone.wait()
        except TimeoutError:
            return

    def abandon(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by behaviour only

    def data_received(self, data: bytes) -> None:
        if self._unanswered_since is not None:
            self._unanswered_since = None
            self.answers += 1
        self._head = (self._head + data)[:MAX_HEAD_BYTES]
        self.ends_announced = self.ends_announced or _announces_end(self._head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        self._on_lost(self)


def _announces_end(head: bytes) -> bool:
    """Whether llama-server closes after this answer: it says so, and it does after every error."""
    status = _STATUS.match(head)
    is_error = status is not None and int(status[1]) >= 400
    return is_error or b"\r\nconnection: close" in head.partition(b"\r\n\r\n")[0].lower()


def _question(host: str, port: int, api_key: str | None) -> bytes:
    authority = f"[{host}]" if ":" in host else host
    key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    return f"GET /health HTTP/1.1\r\nHost: {authority}:{port}\r\n{key}\r\n".encode("latin-1")
