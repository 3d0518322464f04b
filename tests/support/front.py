"""The smallest proxy there can be: receive, send, relay. No slots, no sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from aiohttp import web

from kvproxy.clock import SystemClock
from kvproxy.dialects.endpoints import classify
from kvproxy.errors import ReplyError
from kvproxy.proxy.envelope import error_response
from kvproxy.proxy.headers import upstream_headers
from kvproxy.proxy.receive import read_body, stream_body
from kvproxy.proxy.relay import Ending, RelayedResponse, Stall, relay
from kvproxy.proxy.server import create_runner
from kvproxy.proxy.tap import Tap
from kvproxy.upstream.transport import Body, Transport


@dataclass(slots=True)
class Front:
    """A listening proxy before `upstream`. `endings` has one entry per relayed answer that ended."""

    upstream: str
    max_body_bytes: int = 1 << 27
    streams_bodies: bool = False
    extra_headers: dict[str, str] = field(default_factory=dict)
    stall: Stall | None = None
    endings: list[Ending | None] = field(default_factory=list)
    cancelled: int = 0
    stalled: int = 0
    running: int = 0
    on_headers: Callable[[], None] | None = None
    port: int = 0
    _runner: web.ServerRunner | None = None
    _transport: Transport | None = None

    async def __aenter__(self) -> Self:
        self._transport = Transport(self.upstream, SystemClock(), connect_timeout=1.0)
        self._runner = create_runner(self._handle, shutdown_seconds=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        assert self._transport is not None
        await self._runner.cleanup()
        await self._transport.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.running += 1
        try:
            return await self._exchange(request)
        except ReplyError as error:
            return error_response(classify(request.method, request.raw_path).dialect, error)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def _stalled(self) -> None:
        self.stalled += 1

    async def _exchange(self, request: web.BaseRequest) -> RelayedResponse:
        assert self._transport is not None
        body: Body
        if self.streams_bodies:
            body = stream_body(request, self.max_body_bytes)
        else:
            body = await read_body(request, self.max_body_bytes)
        headers = upstream_headers(
            request.raw_headers, peer=request.remote, scheme="http", host=request.headers.get("Host")
        )
        upstream = await self._transport.send(request.method, request.raw_path, headers, body)
        response = await relay(
            request,
            upstream,
            extra_headers=self.extra_headers,
            tap=Tap(SystemClock()),
            on_headers=self.on_headers,
            stall=self.stall,
            on_stall=self._stalled,
        )
        self.endings.append(response.ending)
        return response


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return as soon as `condition` holds; TimeoutError if it does not within `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.002)
