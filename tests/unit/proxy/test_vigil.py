from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from kvproxy.dialects.patience import Patience
from kvproxy.errors import CapacityError, ErrorCode
from kvproxy.identifiers import ServerName
from kvproxy.proxy.call import Call
from kvproxy.proxy.server import create_runner
from kvproxy.proxy.vigil import Vigil, Watchers
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Event, RequestHeld

MAIN = ServerName("main")
Deed = Callable[[Vigil], Awaitable[web.StreamResponse]]


class Stage:
    """A handler that keeps a vigil and does what the test says."""

    def __init__(self, after_seconds: float, every_seconds: float, *, streams: bool) -> None:
        self.events: list[Event] = []
        self.tasks = TaskSet(lambda name, error: self.events.append(cast(Event, (name, error))))
        patience = Patience(after_seconds, every_seconds)
        self.watchers = Watchers(MAIN, patience, self.tasks, self.events.append, True)
        endpoint = SimpleNamespace(label="chat/completions")
        self.call = cast(Call, SimpleNamespace(endpoint=endpoint, streams=streams, is_anonymous=False))
        self.ended = asyncio.Event()

    @asynccontextmanager
    async def ask(self, deed: Deed) -> AsyncIterator[aiohttp.ClientResponse]:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            vigil = Vigil(self.watchers, request, self.call)
            try:
                return await deed(vigil)
            finally:
                vigil.end()
                self.ended.set()

        runner = create_runner(handle, shutdown_seconds=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        try:
            async with aiohttp.ClientSession() as session, session.post(url) as response:
                yield response
        finally:
            await runner.cleanup()
            assert not len(self.tasks)


def stage(after_seconds: float = 0.01, every_seconds: float = 0.01, *, streams: bool = True) -> Stage:
    return Stage(after_seconds, every_seconds, streams=streams)


FULL = CapacityError(ErrorCode.QUEUE_TIMEOUT, "no slot came free")


async def held(vigil: Vigil) -> web.StreamResponse:
    """Held for long, and refused in the end."""
    vigil.waits()
    vigil.waits()
    await asyncio.sleep(0.1)
    assert vigil.begun is not None
    return await vigil.refuse(FULL)


async def test_a_held_stream_is_begun_and_kept_alive_until_it_ends() -> None:
    here = stage()
    async with here.ask(held) as response:
        raw = await response.read()
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/event-stream"
    assert response.headers["X-KVProxy-Outcome"] == "pending"
    assert response.headers["X-KVProxy-Slot"] == "-"
    pulses, _, failure = raw.rpartition(b":\n\n")
    assert set(pulses.split(b":\n\n")) == {b""}
    assert failure.startswith(b'data: {"error":')
    assert b"KV_QUEUE_TIMEOUT" in failure
    assert here.events == [RequestHeld(MAIN, "chat/completions", None, 0.01)]


async def quick(vigil: Vigil) -> web.StreamResponse:
    vigil.waits()
    vigil.sent()
    await asyncio.sleep(0.05)
    assert vigil.begun is None
    return web.Response(status=409, text="the server's own")


async def test_a_request_that_was_sent_in_time_is_the_servers_to_answer() -> None:
    async with stage().ask(quick) as response:
        assert (response.status, await response.text()) == (409, "the server's own")


async def silent(vigil: Vigil) -> web.StreamResponse:
    vigil.waits()
    await asyncio.sleep(0.05)
    assert vigil.begun is None
    return web.Response(status=409)


@pytest.mark.parametrize(("after_seconds", "streams"), [(0.0, True), (0.01, False), (5.0, True)])
async def test_nothing_is_sent_where_it_is_off_or_too_soon_or_no_stream(
    after_seconds: float, streams: bool
) -> None:
    here = stage(after_seconds, streams=streams)
    async with here.ask(silent) as response:
        assert response.status == 409
    assert here.events == []


async def test_a_request_that_need_not_wait_has_no_timer() -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a timer was set")

    async def at_once(vigil: Vigil) -> web.StreamResponse:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "call_later", never, raising=False)
            vigil.sent()
            vigil.end()
        return web.Response()

    async with stage().ask(at_once) as response:
        assert response.status == 200


async def test_after_the_server_spoke_there_is_no_pulse_more() -> None:
    async def spoken(vigil: Vigil) -> web.StreamResponse:
        vigil.waits()
        await asyncio.sleep(0.05)
        vigil.sent()
        await asyncio.sleep(0.05)
        vigil.end()
        begun = vigil.begun
        assert begun is not None
        for piece in (b"data: {", b'"half":1}', b"\n\n"):
            await begun.write(piece)
            await asyncio.sleep(0.03)
        await begun.write_eof()
        return begun

    async with stage().ask(spoken) as response:
        raw = await response.read()
    assert raw.lstrip(b":\n") == b'data: {"half":1}\n\n'


async def test_a_client_that_leaves_a_held_stream_ends_its_pulses() -> None:
    here = stage()

    async def long(vigil: Vigil) -> web.StreamResponse:
        vigil.waits()
        await asyncio.sleep(30)
        raise AssertionError

    async with here.ask(long) as response:
        await response.content.readany()
        response.close()
        async with asyncio.timeout(5):
            await here.ended.wait()
