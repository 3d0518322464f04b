"""Connection manners of the original: what it says about keep-alive, when it hangs up, and how it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from dataclasses import dataclass

from aiohttp import web

from tests.fakes.faults import Faults

# Closes with a reset, as the kernel does for a killed process that had data unread.
_RESET = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Usage:
    """One connection so far."""

    requests: int = 0
    running: int = 0


class Wire:
    """Counts requests per connection and closes those that overstay."""

    def __init__(self, faults: Faults, *, idle_close: float, max_requests: int) -> None:
        self.faults = faults
        self.idle_close = idle_close
        self.max_requests = max_requests
        self._usage: dict[web.RequestHandler, Usage] = {}

    def arrived(self, request: web.Request) -> None:
        usage = self._of(request.protocol)
        usage.requests += 1
        usage.running += 1

    def left(self, request: web.Request) -> None:
        self._of(request.protocol).running -= 1
        if self.faults.drop_idle_after:
            loop = asyncio.get_running_loop()
            loop.call_later(self.faults.drop_idle_after, self._close_if_idle, request.protocol)

    async def dress(self, request: web.Request, response: web.StreamResponse) -> None:
        """Header fields of the original; a status of 400 or more and the 100th request close."""
        response.headers.popall("Date", None)
        response.headers["Server"] = "llama.cpp"
        response.headers["Access-Control-Allow-Origin"] = request.headers.get("Origin", "")
        last = self._of(request.protocol).requests >= self.max_requests
        if response.status >= 400 or last or not request.keep_alive:
            response.headers["Connection"] = "close"
            response.force_close()
        else:
            response.headers["Keep-Alive"] = f"timeout={self.idle_close:g}, max={self.max_requests}"

    def _of(self, connection: web.RequestHandler) -> Usage:
        if connection not in self._usage:
            self._usage = {c: usage for c, usage in self._usage.items() if c.transport is not None}
            self._usage[connection] = Usage()
        return self._usage[connection]

    def _close_if_idle(self, connection: web.RequestHandler) -> None:
        if not self._of(connection).running:
            connection.force_close()


def reset_all(server: web.Server) -> None:
    for connection in server.connections:
        if connection.transport is not None:
            reset(connection.transport)


def reset(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None:
        # A duplicate, because not every event loop lets one set options on its own socket.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(sock.fileno())) as twin:
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # OSError: the peer was faster
    transport.abort()


def is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()
