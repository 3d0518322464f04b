from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvproxy.upstream import sentinel as sentinel_module
from kvproxy.upstream.sentinel import SILENT_INTERVALS, Sentinel
from tests.support.raw_http import HOLD, RawRequest, RawServer, reply

OK = reply(200, {"status": "ok"})
LAST = reply(200, {"status": "ok"}, "Connection: close")
LOADING = reply(503, {"error": {"message": "Loading model"}})
INTERVAL = 0.01


class HandClock:
    """Stands still until it is moved."""

    seconds = 100.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds


class Watch:
    """A running sentinel and what it told, in order."""

    def __init__(self, port: int, api_key: str | None = None) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.clock = HandClock()
        self.sentinel = Sentinel(
            "127.0.0.1",
            port,
            None,
            api_key=api_key,
            on_break=lambda: self.told.put_nowait("break"),
            on_connect=lambda: self.told.put_nowait("connect"),
            clock=self.clock,
            interval_seconds=INTERVAL,
        )

    async def next(self) -> str:
        return await asyncio.wait_for(self.told.get(), 5)


@asynccontextmanager
async def watching(port: int, api_key: str | None = None) -> AsyncIterator[Watch]:
    watch = Watch(port, api_key)
    running = asyncio.get_running_loop().create_task(watch.sentinel.run())
    try:
        yield watch
    finally:
        watch.sentinel.close()
        await asyncio.wait_for(running, 5)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel_module, "MIN_PAUSE_SECONDS", 0.002)
    monkeypatch.setattr(sentinel_module, "MAX_PAUSE_SECONDS", 0.01)


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with RawServer(lambda _: OK) as raw:
        yield raw


async def asked(server: RawServer, times: int = 1) -> RawRequest:
    """The `times`-th question from here on."""
    for _ in range(times):
        request = await asyncio.wait_for(server.arrived.get(), 5)
    return request


def in_turn(*answers: bytes) -> Callable[[RawRequest], bytes]:
    """The answers one after the other, the last one for ever."""
    left = list(answers)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


async def test_it_asks_for_health_again_and_again_on_one_connection(server: RawServer) -> None:
    async with watching(server.port) as watch:
        request = await asked(server, 4)
        assert request.line == "GET /health HTTP/1.1"
        assert f"Host: 127.0.0.1:{server.port}\r\n".encode() in request.head
        assert await watch.next() == "connect"
        assert watch.sentinel.connected
        assert server.connections == 1
        assert watch.told.empty()


async def test_a_connection_that_breaks_is_told_at_once(server: RawServer) -> None:
    async with watching(server.port) as watch:
        await asked(server, 2)
        assert await watch.next() == "connect"
        await server.refuse()
        server.drop()
        assert await watch.next() == "break"
        assert not watch.sentinel.connected


async def test_a_break_is_told_once_however_long_nobody_answers(server: RawServer) -> None:
    async with watching(server.port) as watch:
        await asked(server, 2)
        await server.refuse()
        server.drop()
        assert [await watch.next(), await watch.next()] == ["connect", "break"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.told.get(), 0.05)


async def test_it_connects_again_after_a_break(server: RawServer) -> None:
    async with watching(server.port) as watch:
        await asked(server, 2)
        server.drop()
        assert [await watch.next() for _ in range(3)] == ["connect", "break", "connect"]
        await asked(server, 2)
        server.drop()
        assert await watch.next() == "break"


async def test_a_server_that_starts_later_is_found_and_was_never_broken(server: RawServer) -> None:
    await server.refuse()
    async with watching(server.port) as watch:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.told.get(), 0.03)
        await server.listen()
        assert await watch.next() == "connect"


async def test_an_announced_end_is_no_break_but_the_new_connection_is_told(server: RawServer) -> None:
    server.answer = in_turn(OK, LAST, OK)
    async with watching(server.port) as watch:
        assert (await asked(server, 3)).connection == 1
        assert [await watch.next(), await watch.next()] == ["connect", "connect"]
        assert watch.told.empty()


@pytest.mark.parametrize(
    ("pieces", "announced"),
    [
        ((b"HTTP/1.1 200 OK\r\nConnec", b"tion: close\r\nContent-Length: 0\r\n\r\n"), True),
        ((b"HTTP/1.1 5", b"03 Service Unavailable\r\nContent-Length: 0\r\n\r\n"), True),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n", b"\r\nConnection: close"), False),
        ((OK,), False),
        ((LAST,), True),
        ((LOADING,), True),
    ],
)
def test_what_announces_an_end_is_read_from_the_head_in_whatever_pieces(
    pieces: tuple[bytes, ...], announced: bool
) -> None:
    line = sentinel_module._Line(b"", lambda _: None)
    for piece in pieces:
        line.data_received(piece)
    assert line.ends_announced is announced


async def test_a_server_that_is_gone_after_an_announced_end_is_a_break(server: RawServer) -> None:
    async def last_words(_: RawRequest) -> bytes:
        await server.refuse()
        return LAST

    server.answer = last_words
    async with watching(server.port) as watch:
        assert [await watch.next(), await watch.next()] == ["connect", "break"]


async def test_a_gateway_that_ends_each_line_after_one_answer_is_called_ever_more_slowly(
    server: RawServer,
) -> None:
    server.answer = lambda _: LAST
    async with watching(server.port) as watch:
        await asked(server, 6)
        assert watch.sentinel._pause == sentinel_module.MAX_PAUSE_SECONDS


async def test_the_line_is_changed_before_the_server_ends_it(
    server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel_module, "REQUESTS_PER_LINE", 3)
    async with watching(server.port) as watch:
        requests = [await asked(server) for _ in range(6)]
        assert [request.connection for request in requests] == [0, 0, 0, 1, 1, 1]
        assert await asyncio.wait_for(server.ended.get(), 5) == 0
        assert await watch.next() == "connect"
        assert watch.told.empty()


async def test_a_line_that_cannot_be_changed_is_used_on(
    server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentinel_module, "REQUESTS_PER_LINE", 2)
    async with watching(server.port) as watch:
        await asked(server)
        await server.refuse()
        await asked(server, 4)
        assert server.connections == 1
        assert await watch.next() == "connect"
        assert watch.told.empty()


async def test_it_does_not_ask_twice_before_it_has_an_answer(server: RawServer) -> None:
    server.answer = lambda _: HOLD
    async with watching(server.port) as watch:
        await asked(server)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.arrived.get(), 5 * INTERVAL)
        assert watch.sentinel.connected


async def test_a_server_that_falls_silent_is_a_break(server: RawServer) -> None:
    server.answer = lambda _: HOLD
    async with watching(server.port) as watch:
        await asked(server)
        assert await watch.next() == "connect"
        watch.clock.seconds += SILENT_INTERVALS * INTERVAL * 1.5
        assert await watch.next() == "break"
        assert await asyncio.wait_for(server.ended.get(), 5) == 0


async def test_close_is_quiet_and_leaves_no_connection(server: RawServer) -> None:
    async with watching(server.port) as watch:
        await asked(server, 2)
        assert await watch.next() == "connect"
    assert await asyncio.wait_for(server.ended.get(), 5) == 0
    assert not watch.sentinel.connected
    assert watch.told.empty()


async def test_a_cancelled_run_leaves_no_connection(server: RawServer) -> None:
    watch = Watch(server.port)
    running = asyncio.get_running_loop().create_task(watch.sentinel.run())
    await asked(server)
    running.cancel()
    await asyncio.wait({running})
    assert await asyncio.wait_for(server.ended.get(), 5) == 0
    assert not watch.sentinel.connected


async def test_close_during_the_dialling_is_quiet_and_leaves_no_connection(
    server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(server.port)
    dial = watch.sentinel._dial

    async def dial_and_close() -> object:
        line = await dial()
        watch.sentinel.close()
        return line

    monkeypatch.setattr(watch.sentinel, "_dial", dial_and_close)
    await asyncio.wait_for(watch.sentinel.run(), 5)
    assert watch.told.empty()
    assert await asyncio.wait_for(server.ended.get(), 5) == 0


async def test_dialling_in_vain_after_close_is_no_break(
    server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = lambda _: LAST
    async with watching(server.port) as watch:
        assert await watch.next() == "connect"
        dialled = asyncio.Event()

        async def close_and_fail() -> object:
            watch.sentinel.close()
            dialled.set()
            raise ConnectionRefusedError

        monkeypatch.setattr(watch.sentinel, "_dial", close_and_fail)
        await asyncio.wait_for(dialled.wait(), 5)
    assert watch.told.empty()


async def test_a_connection_lost_before_it_was_taken_is_a_break(
    server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(server.port)
    dial = watch.sentinel._dial

    async def dial_and_lose() -> sentinel_module._Line:
        line = await dial()
        await line.wait(0.001)
        server.drop()
        await line.wait(5)
        return line

    monkeypatch.setattr(watch.sentinel, "_dial", dial_and_lose)
    running = asyncio.get_running_loop().create_task(watch.sentinel.run())
    assert [await watch.next(), await watch.next()] == ["connect", "break"]
    watch.sentinel.close()
    await asyncio.wait_for(running, 5)


async def test_the_key_is_sent_where_there_is_one(server: RawServer) -> None:
    async with watching(server.port, "secret"):
        assert b"Authorization: Bearer secret\r\n" in (await asked(server)).head


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert b"Host: [::1]:8080\r\n" in sentinel_module._question("::1", 8080, None)
