"""Keep-alive, closes, and the lives of a process."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from tests.contract.subject import Flags, Subject

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_answers_promise_keep_alive_and_carry_no_date(server: Subject) -> None:
    headers = (await server.ask("GET", "/health")).headers
    assert headers["Keep-Alive"] == "timeout=5, max=100"
    assert headers["Server"] == "llama.cpp"
    assert headers["Access-Control-Allow-Origin"] == ""
    assert "Date" not in headers
    assert "Connection" not in headers


async def test_an_origin_is_echoed(server: Subject) -> None:
    reply = await server.ask("GET", "/health", Origin="http://evil.example")
    assert reply.headers["Access-Control-Allow-Origin"] == "http://evil.example"


async def test_streams_are_chunked_and_unbuffered(server: Subject) -> None:
    body = server.body("x", 1, stream=True)
    headers = (await server.ask("POST", "/completion", body)).headers
    assert headers["Transfer-Encoding"] == "chunked"
    assert headers["X-Accel-Buffering"] == "no"
    assert headers["Keep-Alive"] == "timeout=5, max=100"


async def test_an_error_closes_its_connection(server: Subject) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"\r\nConnection: close\r\n" in answer
    writer.close()


async def test_the_hundredth_request_closes_its_connection(server: Subject) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for number in range(1, 101):
        writer.write(HEALTH)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len('{"status":"ok"}'))
        assert (b"Connection: close" in head) is (number == 100)
    assert await reader.read() == b""
    writer.close()


async def test_connections_idle_for_five_seconds_are_closed_used_or_not(server: Subject) -> None:
    unused, first = await asyncio.open_connection("127.0.0.1", server.port)
    used, second = await asyncio.open_connection("127.0.0.1", server.port)
    second.write(HEALTH)
    await used.readuntil(b'{"status":"ok"}')
    began = time.monotonic()
    await asyncio.gather(unused.read(), used.read())
    assert 4.5 < time.monotonic() - began < 6.0
    first.close()
    second.close()


async def test_a_kill_breaks_a_running_stream(server: Subject) -> None:
    async with server.busy(0) as stream:
        await server.process.kill()
        with pytest.raises(aiohttp.ClientError):
            await stream.rest()


async def test_nobody_listens_after_a_kill(server: Subject) -> None:
    await server.process.kill()
    with pytest.raises(aiohttp.ClientConnectorError):
        await server.ask("GET", "/health")


async def test_a_new_life_has_a_new_marker_empty_slots_and_task_ids_from_the_start(server: Subject) -> None:
    for _ in range(20):
        await server.complete("hello", id_slot=0)
    marker = (await server.get("/props"))["media_marker"]
    old_task = (await server.slots())[0]["id_task"]
    await server.process.restart()
    assert (await server.get("/props"))["media_marker"] != marker
    assert "id_task" not in (await server.slots())[0]
    assert await server.held(0) == 0
    await server.complete("hello", id_slot=0)
    assert (await server.slots())[0]["id_task"] < old_task


async def test_the_marker_stays_within_a_life(server: Subject) -> None:
    assert (await server.get("/props"))["media_marker"] == (await server.get("/props"))["media_marker"]


@pytest.mark.parametrize("flags", [Flags(sleep_after=1)])
async def test_sleep_empties_the_slots_and_keeps_the_marker(server: Subject) -> None:
    marker = (await server.get("/props"))["media_marker"]
    await server.complete("hello", id_slot=0)
    await server.asleep()
    assert (await server.get("/props"))["is_sleeping"] is True
    assert (await server.get("/health")) == {"status": "ok"}
    assert (await server.get("/props"))["media_marker"] == marker
    assert (await server.get("/props"))["is_sleeping"] is True
    assert "id_task" not in (await server.slots())[0]
    assert (await server.get("/props"))["is_sleeping"] is False


@pytest.mark.parametrize("flags", [Flags(sleep_after=1)])
async def test_a_save_wakes_a_sleeper_and_saves_nothing(server: Subject) -> None:
    await server.complete("hello", id_slot=0)
    await server.asleep()
    assert (await server.act("save", 0, "slept")).json["n_saved"] == 0


@pytest.mark.parametrize("flags", [Flags(defaults=True)])
async def test_with_default_flags_each_launch_clears_the_other_idle_slots(server: Subject) -> None:
    assert (await server.get("/props"))["total_slots"] == 4
    await server.complete("A" * 300, id_slot=0)
    await server.complete("B" * 200, id_slot=1)
    first, second, *_ = await server.slots()
    assert first["n_prompt_tokens"] == 0
    assert second["n_prompt_tokens"] > 200
    back = await server.complete("A" * 300 + "more", id_slot=0)
    assert back["timings"]["cache_n"] == 0
    assert (await server.act("save", 1, "lost")).json["n_saved"] == 0


@pytest.mark.parametrize("flags", [Flags(defaults=True)])
async def test_with_default_flags_an_unpinned_request_finds_its_content_in_the_prompt_cache(
    server: Subject,
) -> None:
    first = await server.complete("A" * 300, id_slot=0)
    await server.complete("B" * 200, id_slot=1)
    back = await server.complete("A" * 300 + "more")
    assert back["timings"]["cache_n"] >= first["tokens_evaluated"]
