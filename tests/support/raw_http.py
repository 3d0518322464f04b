"""A server of a few lines on a loopback socket, for what no well-behaved server does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import orjson

from scripts.ports import free_port

HOLD = b""
"""The answer that never comes: the connection stays open."""


@dataclass(frozen=True, slots=True)
class RawRequest:
    line: str
    head: bytes
    body: bytes
    connection: int
    """Which connection it came on, counted from 0."""


Answer = Callable[[RawRequest], bytes | Awaitable[bytes]]


def reply(status: int, body: object, *headers: str) -> bytes:
    """One whole answer; bytes go as they are, anything else as JSON."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(raw)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + raw


class RawServer:
    """Answers each request with what `answer` gives; remembers what came."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[RawRequest] = []
        self.arrived: asyncio.Queue[RawRequest] = asyncio.Queue()
        self.ended: asyncio.Queue[int] = asyncio.Queue()
        """The connections that the other side has left."""
        self.port = free_port()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self._writers)

    async def listen(self) -> None:
        """Each time on the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def refuse(self) -> None:
        """Take no more connections; those that stand go on."""
        assert self._server is not None
        self._server.close()
        await asyncio.sleep(0)

    def drop(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        self.drop()
        for writer in self._writers:
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = len(self._writers)
        self._writers.append(writer)
        try:
            while await self._serve_one(reader, writer, connection):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.put_nowait(connection)
        finally:
            writer.close()

    async def _serve_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        body = await reader.readexactly(int(fields.get(b"content-length", 0)))
        request = RawRequest(head.split(b"\r\n", 1)[0].decode(), head, body, connection)
        self.requests.append(request)
        self.arrived.put_nowait(request)
        given = self.answer(request)
        raw = given if isinstance(given, bytes) else await given
        writer.write(raw)
        await writer.drain()
        closing = raw is not HOLD and b"connection: close" in raw.lower() + head.lower()
        return not closing
