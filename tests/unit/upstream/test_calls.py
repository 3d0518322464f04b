from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from kvproxy.upstream import calls as calls_module
from kvproxy.upstream.calls import Calls, Reply
from tests.support.raw_http import HOLD, RawRequest, RawServer, reply

ONE = Reply(200, {"total_slots": 1}, "")

Connect = Callable[..., Calls]


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with RawServer(lambda _: HOLD) as raw:
        yield raw


@pytest.fixture
async def connect(server: RawServer) -> AsyncIterator[Connect]:
    made: list[Calls] = []

    def to(url: str | None = None, api_key: str | None = None) -> Calls:
        made.append(Calls(url or server.url, api_key, connect_timeout_seconds=2.0))
        return made[-1]

    yield to
    for calls in made:
        await calls.close()


def always(*headers: str, status: int = 200) -> Callable[[RawRequest], bytes]:
    return lambda _: reply(status, ONE.body, *headers)


async def test_each_call_has_a_connection_of_its_own_and_ends_it(server: RawServer, connect: Connect) -> None:
    server.answer = always()
    calls = connect()
    assert await calls.make("GET", "/props", 5) == await calls.make("GET", "/props", 5) == ONE
    assert [request.connection for request in server.requests] == [0, 1]
    assert b"Connection: close" in server.requests[0].head


async def test_the_key_is_sent_and_does_not_follow_a_redirect(server: RawServer, connect: Connect) -> None:
    async with RawServer(always()) as elsewhere:
        server.answer = always(f"Location: {elsewhere.url}/props", status=307)
        assert (await connect(api_key="secret").make("GET", "/props", 5)).status == 307
        assert b"Authorization: Bearer secret\r\n" in server.requests[0].head
        assert elsewhere.requests == []


async def test_cookies_are_not_kept(server: RawServer, connect: Connect) -> None:
    server.answer = always("Set-Cookie: a=b")
    # By its name: of an address aiohttp would not keep them in any case.
    calls = connect(f"http://localhost:{server.port}")
    await calls.make("GET", "/props", 5)
    await calls.make("GET", "/props", 5)
    assert b"cookie" not in server.requests[1].head.lower()


async def test_a_proxy_named_in_the_environment_is_not_used(
    server: RawServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    server.answer = always()
    assert await connect().make("GET", "/props", 5) == ONE


async def test_a_path_in_the_base_url_is_kept(server: RawServer, connect: Connect) -> None:
    server.answer = always()
    await connect(server.url + "/llama/").make("GET", "/props", 5)
    assert server.requests[0].line == "GET /llama/props HTTP/1.1"


async def test_an_endless_answer_is_cut_off(
    server: RawServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "MAX_REPLY_BYTES", 1000)
    server.answer = lambda _: b"HTTP/1.1 200 X\r\nContent-Length: 999999\r\n\r\n" + b"[" * 2000
    given = await connect().make("GET", "/props", 5)
    assert (given.status, given.body, given.text[:2]) == (200, None, "[[")


async def test_what_is_no_json_is_told_by_its_first_words_unless_it_is_a_page(
    server: RawServer, connect: Connect
) -> None:
    server.answer = lambda _: b"HTTP/1.1 500 X\r\nContent-Length: 9\r\n\r\nno\nmemory"
    assert (await connect().make("GET", "/props", 5)).message == "no memory"
    server.answer = lambda _: b"HTTP/1.1 502 X\r\nContent-Length: 6\r\n\r\n<html>"
    assert (await connect().make("GET", "/props", 5)).message == "HTTP 502"


async def test_calls_are_settled_once_all_that_were_under_way_are_over(
    server: RawServer, connect: Connect
) -> None:
    calls = connect()
    assert await calls.settled(5)

    call = asyncio.ensure_future(calls.make("POST", "/slots/0?action=save", 5, b"{}"))
    await asyncio.wait_for(server.arrived.get(), 5)
    assert not await calls.settled(0.05)
    waiting = asyncio.ensure_future(calls.settled(5))

    call.cancel()
    assert await waiting
    assert await calls.settled(0)
