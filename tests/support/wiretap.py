"""A wire between kvproxy and a real server that forwards every byte and remembers what was asked, and when
connections ended. The server itself logs no request."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_REQUEST_LINE = re.compile(rb"(GET|HEAD|POST|PUT|DELETE|OPTIONS) (\S+) HTTP/1\.1\r\n")
_SLOT_ACTION = re.compile(r"/slots/(\d+)\?action=(save|restore|erase)")


@dataclass(slots=True)
class Asked:
    """One request seen on the wire. Times are `time.perf_counter` seconds."""

    method: str
    target: str
    at: float
    client_left_at: float | None = None
    """When kvproxy closed the connection, if this was the last request on it."""


class Wiretap:
    def __init__(self, port: int) -> None:
        self.asked: list[Asked] = []
        self._to = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def forget(self) -> None:
        """Forget what was asked so far. At each start kvproxy asks, with a save that must fail, whether slots
        can be saved."""
        self.asked.clear()

    def slot_actions(self) -> list[tuple[str, int]]:
        """What was asked of which slot, in order."""
        found = (_SLOT_ACTION.fullmatch(asked.target) for asked in self.asked if asked.method == "POST")
        return [(match[2], int(match[1])) for match in found if match]

    def last(self, path: str) -> Asked:
        return [asked for asked in self.asked if asked.target == path][-1]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._connect(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the server is away, or the test is over: the wire is cut, which says it all
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._to)
        back = asyncio.get_running_loop().create_task(_forward(up_reader, writer))
        try:
            await self._listen(reader, up_writer)
        finally:
            up_writer.transport.abort()
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)

    async def _listen(self, reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter) -> None:
        asked: Asked | None = None
        try:
            while chunk := await reader.read(1 << 16):
                # No request is sent before the last one was answered, so each begins a piece of its own.
                if match := _REQUEST_LINE.match(chunk):
                    asked = Asked(match[1].decode(), match[2].decode(), time.perf_counter())
                    self.asked.append(asked)
                up_writer.write(chunk)
                await up_writer.drain()
        finally:
            if asked is not None:
                asked.client_left_at = time.perf_counter()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:  # a killed server resets its connections: so do we
        writer.transport.abort()
    else:
        writer.close()
