"""Settings of our own listener, and what it answers when a handler fails."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest
from aiohttp import http_parser, web

from kvproxy.errors import SettingsError
from kvproxy.proxy import server
from kvproxy.proxy.server import create_runner, require_c_parser
from tests.support.raw import connection


def test_the_c_parser_is_there() -> None:
    require_c_parser()


def test_without_the_c_parser_the_settings_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_parser, "HttpRequestParser", http_parser.HttpRequestParserPy)
    with pytest.raises(SettingsError, match="AIOHTTP_NO_EXTENSIONS"):
        require_c_parser()


async def failing(request: web.BaseRequest) -> web.StreamResponse:
    raise ValueError("canary")


async def test_a_handler_that_fails_is_a_500_without_its_reason_and_one_log_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = create_runner(failing, shutdown_seconds=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with connection(runner.addresses[0][1]) as client:
        await client.send(b"GET /secret?key=canary HTTP/1.1\r\nHost: h\r\n\r\n")
        answer = await client.rest()
    await runner.cleanup()

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"Connection: close" in head
    error = orjson.loads(body)["error"]
    assert (error["code"], error["type"]) == ("KV_INVARIANT", "server_error")
    assert "a bug: please report" in error["message"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "canary" not in caplog.records[0].getMessage()


@pytest.mark.parametrize("path", ["/", "//", "*", "/%00", "/a/../b", "http://h/x"])
async def test_every_path_comes_to_the_handler(path: str) -> None:
    async def echo(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(text=request.raw_path)

    runner = create_runner(echo, shutdown_seconds=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with connection(runner.addresses[0][1]) as client:
        await client.send(f"OPTIONS {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
        answer = await client.rest()
    await runner.cleanup()
    assert answer.endswith(path.encode())


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: h\r\nX-Never-En"])
async def test_a_connection_on_which_nothing_is_asked_is_closed(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.05)
    runner = create_runner(failing, shutdown_seconds=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with connection(runner.addresses[0][1]) as client:
        if said:
            await client.send(said)
        assert await asyncio.wait_for(client.rest(), 10) == b""
    await runner.cleanup()


async def test_a_connection_on_which_something_was_asked_may_be_answered_late_and_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def late(request: web.BaseRequest) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return web.Response(text="ok")

    monkeypatch.setattr(server, "HEAD_SECONDS", 0.05)
    runner = create_runner(late, shutdown_seconds=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with connection(runner.addresses[0][1]) as client:
        for _ in range(2):
            await client.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            assert b" 200 " in await asyncio.wait_for(client.head(), 10)
            assert await client.exactly(2) == b"ok"
            await asyncio.sleep(0.1)
    await runner.cleanup()
