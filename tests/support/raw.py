"""Sockets without manners: servers and clients that write exactly the bytes a test wants to see."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

LIMIT = 1 << 26


@dataclass(slots=True)
class Wire:
    """One connection, as bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        """Everything up to and with the empty line."""
        return await self.reader.readuntil(b"\r\n\r\n")

    async def exactly(self, size: int) -> bytes:
        return await self.reader.readexactly(size)

    async def until(self, mark: bytes) -> bytes:
        return await self.reader.readuntil(mark)

    async def rest(self) -> bytes:
        """All bytes until the other side closes. Raises ConnectionResetError for a reset."""
        return await self.reader.read()

    async def gone(self) -> bool:
        """Wait until the other side has closed; what it still sent is dropped."""
        try:
            await self.reader.read()
        except ConnectionError:
            return True
        return True

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        abort(self.writer.transport)


def abort(transport: asyncio.WriteTransport) -> None:
    """Close at once; harmless for a transport that is closed already, where asyncio's own may raise."""
    if not transport.is_closing() or transport.get_write_buffer_size():
        transport.abort()


Script = Callable[[Wire], Awaitable[None]]
"""What a server does with one connection; when it returns, the connection is closed."""


@dataclass(slots=True)
class RawServer:
    """A server that plays a script on each connection."""

    script: Script
    connections: int = 0
    heads: list[bytes] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    port: int = 0
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._play, "127.0.0.1", 0, limit=LIMIT, backlog=512)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for wire in self.wires:
            abort(wire.writer.transport)

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        self.connections += 1
        self.wires.append(wire)
        try:
            await self.script(wire)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the other side left, which many tests ask it to
        finally:
            writer.close()

    async def request(self, wire: Wire) -> bytes:
        """Read one request with a Content-Length body; its head is remembered, its body returned."""
        head = await wire.head()
        self.heads.append(head)
        return await wire.exactly(content_length(head))


def content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def fields(head: bytes) -> list[tuple[str, str]]:
    """The header fields in order, names as written."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return [(name, value.strip()) for name, _, value in pairs]


@asynccontextmanager
async def connection(port: int, *, receive_buffer: int | None = None) -> AsyncIterator[Wire]:
    """A client's connection. A small `receive_buffer` makes a client that stops reading felt at once."""
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    limit = LIMIT if receive_buffer is None else receive_buffer
    wire = Wire(*await asyncio.open_connection(sock=sock, limit=limit))
    try:
        yield wire
    finally:
        abort(wire.writer.transport)
