"""Clients of streams while their requests are held: for a slot, for a save, for a restore."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvproxy.telemetry.events import RequestFailed, RequestHeld
from tests.support.proxy import House, house
from tests.support.talk import FILLER, Talk, text_of_stream

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COMMENT = b":\n\n"
HASTY = {"after_seconds": 0.1, "every_seconds": 0.05}
HELD_SECONDS = 0.5


@asynccontextmanager
async def one_slot(tmp_path: Path, **sections: Any) -> AsyncIterator[House]:
    """One slot that two conversations share, with slow slot actions where a test wants them."""
    given: dict[str, Any] = {"keep_alive": HASTY, "restore": {"timeout_seconds": 9}, **sections}
    given["checkpoint"] = {"timeout_seconds": 9, **given.get("checkpoint", {})}
    async with house(tmp_path, **given) as here:
        yield here


def document(path: str, text: str, **more: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"input": text, "max_output_tokens": 8, "stream": True, **more}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": True, **more}


async def ask(here: House, path: str, text: str, **headers: str) -> tuple[aiohttp.ClientResponse, bytes]:
    async with here.proxy.client.post(path, json=document(path, text), headers=headers) as response:
        return response, await response.read()


async def two_that_share(here: House) -> tuple[Talk, Talk]:
    """The first is stored, the second lives in the slot, saved."""
    first, second = Talk("alpha"), Talk("beta")
    for talk in (first, second, first, second):
        assert (await here.proxy.turn(talk)).status == 200
    await here.proxy.at_rest()
    return first, second


async def test_a_slow_restore_is_bridged_and_the_answer_follows_untouched(tmp_path: Path) -> None:
    async with one_slot(tmp_path) as here:
        first, _ = await two_that_share(here)
        here.fake.faults.restore_seconds = HELD_SECONDS
        async with here.proxy.stream(first) as stream:
            text = await stream.rest()
        assert stream.told == ("pending", None)
        assert stream.response.headers["Content-Type"] == "text/event-stream"
        assert stream.raw.startswith(COMMENT * 2)
        assert COMMENT not in stream.raw.lstrip(b":\n")
        assert stream.raw.endswith(b"data: [DONE]\n\n")
        first.heard(text)
        done = here.proxy.done[-1]
        assert (done.outcome, done.status) == ("restored", 200)
        assert (done.reused_tokens or 0) > (done.computed_tokens or 0)
        assert len(here.proxy.heard(RequestHeld)) == 1


async def test_a_slow_save_is_bridged_too(tmp_path: Path) -> None:
    async with one_slot(tmp_path) as here:
        assert (await here.proxy.turn(Talk("alpha"))).status == 200
        here.fake.faults.save_seconds = HELD_SECONDS
        other = Talk("beta")
        async with here.proxy.stream(other) as stream:
            other.heard(await stream.rest())
        assert stream.told == ("pending", None)
        assert stream.raw.startswith(COMMENT)


async def test_what_is_held_for_a_moment_only_keeps_its_own_headers(tmp_path: Path) -> None:
    async with one_slot(tmp_path, keep_alive={"after_seconds": 5}) as here:
        first, _ = await two_that_share(here)
        here.fake.faults.restore_seconds = 0.1
        async with here.proxy.stream(first) as stream:
            first.heard(await stream.rest())
        assert stream.told == ("restored", None)
        assert COMMENT not in stream.raw
        assert here.proxy.heard(RequestHeld) == []


async def test_an_answer_that_is_no_stream_is_waited_for_in_silence(tmp_path: Path) -> None:
    async with one_slot(tmp_path) as here:
        first, _ = await two_that_share(here)
        here.fake.faults.restore_seconds = HELD_SECONDS
        answer = await here.proxy.turn(first)
        assert answer.told == ("restored", None)


async def test_a_slow_prompt_is_the_servers_own_to_keep_alive(tmp_path: Path) -> None:
    """Nothing is held: status and headers are the server's, however long the first word takes."""
    async with one_slot(tmp_path) as here:
        here.fake.faults.slow_first_token = HELD_SECONDS
        talk = Talk("alpha")
        async with here.proxy.stream(talk) as stream:
            talk.heard(await stream.rest())
        assert stream.told == ("cold", "new-session")
        assert COMMENT not in stream.raw


async def test_once_begun_it_is_kept_alive_until_the_servers_first_byte(tmp_path: Path) -> None:
    async with one_slot(tmp_path) as here:
        first, _ = await two_that_share(here)
        here.fake.faults.restore_seconds = 0.2
        here.fake.faults.slow_first_token = HELD_SECONDS
        async with here.proxy.stream(first) as stream:
            first.heard(await stream.rest())
        pulses = stream.raw[: -len(stream.raw.lstrip(b":\n"))]
        assert len(pulses) >= 6 * len(COMMENT)


async def test_between_the_servers_words_there_is_no_pulse_of_ours(tmp_path: Path) -> None:
    async with one_slot(tmp_path) as here:
        first, _ = await two_that_share(here)
        here.fake.faults.restore_seconds = HELD_SECONDS
        here.fake.faults.token_delay = 4 * HASTY["every_seconds"]
        async with here.proxy.stream(first, max_tokens=4) as stream:
            await stream.rest()
        held, _, spoken = stream.raw.partition(b"data: ")
        assert COMMENT in held
        assert spoken.count(b"data: ") >= 4
        assert COMMENT not in spoken


BUSY = {"queue": {"max_wait_seconds": 0.4}}


@asynccontextmanager
async def busy(here: House) -> AsyncIterator[None]:
    """Somebody has the only slot for as long as this lasts."""
    here.fake.faults.token_delay = 0.02
    async with here.proxy.stream(Talk("busy", predict=10_000)) as stream:
        await stream.first()
        yield


@pytest.mark.parametrize(
    ("path", "mark"),
    [
        (CHAT, b'data: {"error":'),
        ("/completion", b'data: {"error":'),
        (MESSAGES, b'event: error\ndata: {"type":"error"'),
        (RESPONSES, b'event: response.failed\ndata: {"type":"response.failed"'),
    ],
)
async def test_a_failure_after_that_is_told_inside_the_stream(tmp_path: Path, path: str, mark: bytes) -> None:
    async with one_slot(tmp_path, **BUSY) as here:
        async with busy(here):
            body = {**document(path, "hello"), "prompt": "hello"}
            async with here.proxy.client.post(path, json=body, headers={"X-Session-Id": "me"}) as response:
                raw = await response.read()
        assert response.status == 200
        *_, last = raw.rstrip(b"\n").split(b"\n\n")
        assert last.startswith(mark)
        assert b"no slot came free" in last
        failed = here.proxy.heard(RequestFailed)[0]
        assert (failed.source, failed.code) == ("proxy", "KV_QUEUE_TIMEOUT")


async def test_the_same_failure_of_a_whole_answer_keeps_its_status(tmp_path: Path) -> None:
    async with one_slot(tmp_path, **BUSY) as here, busy(here):
        answer = await here.proxy.post(CHAT, document(CHAT, "hello", stream=False), X_Session_Id="me")
        assert (answer.status, answer.code) == (503, "KV_QUEUE_TIMEOUT")


async def test_a_refusal_of_the_server_is_told_inside_and_costs_the_conversation_nothing(
    tmp_path: Path,
) -> None:
    async with one_slot(tmp_path, n_ctx=2000) as here:
        first, _ = await two_that_share(here)
        here.fake.faults.restore_seconds = HELD_SECONDS
        turn = first.messages.pop()
        first.messages.append({"role": "user", "content": FILLER * 100})
        async with here.proxy.stream(first) as stream:
            await stream.rest()
        first.messages[-1] = turn
        assert stream.response.status == 200
        error = json.loads(stream.raw.rsplit(b"data: ", 1)[1])["error"]
        assert error["type"] == "exceed_context_size_error"
        assert here.proxy.done[-1].status == 400
        here.fake.faults.restore_seconds = 0
        assert (await here.proxy.turn(first)).told == ("resident", None)


async def test_a_server_that_dies_before_its_first_byte_is_told_inside(tmp_path: Path) -> None:
    async with one_slot(tmp_path) as here:
        first, _ = await two_that_share(here)
        here.fake.faults.restore_seconds = 0.2
        here.fake.faults.slow_first_token = 5.0
        async with here.proxy.stream(first) as stream:
            await stream.first()
            await here.proxy.until(lambda: here.open_requests > 0 and "serving" in here.proxy.slot_states)
            await here.fake.kill()
            await stream.rest()
        assert b"KV_BACKEND_UNAVAILABLE" in stream.raw
        await here.fake.start()
        await here.proxy.ready()


async def test_a_client_that_leaves_while_it_is_held_leaves_nothing_behind(tmp_path: Path) -> None:
    async with one_slot(tmp_path) as here:
        first, _ = await two_that_share(here)
        here.fake.faults.restore_seconds = HELD_SECONDS
        async with here.proxy.stream(first) as stream:
            await stream.first()
        await here.proxy.at_rest()
        assert here.proxy.heard(RequestFailed)[-1].source == "client"
        here.fake.faults.restore_seconds = 0
        assert (await here.proxy.turn(first)).status == 200


# Readers as they are


def continues_reading(raw: bytes) -> str:
    """As Continue reads: a line that begins `: ping` is the end."""
    lines = []
    for line in raw.decode().split("\n"):
        if line.startswith(": ping"):
            break
        lines.append(line)
    return "\n".join(lines)


async def test_a_reader_that_ends_at_a_ping_line_reads_to_the_end(tmp_path: Path) -> None:
    async with one_slot(tmp_path) as here:
        first, _ = await two_that_share(here)
        here.fake.faults.restore_seconds = HELD_SECONDS
        async with here.proxy.stream(first) as stream:
            await stream.rest()
        assert stream.told == ("pending", None)
        assert first.is_mine(text_of_stream(continues_reading(stream.raw).encode()))


async def read_parsed(response: aiohttp.ClientResponse, idle_seconds: float) -> tuple[str, float]:
    """As Codex reads: only an event that was parsed is a sign of life. What ended it, or "idle"; and the
    longest time between two events."""
    longest, last, data = 0.0, time.monotonic(), b""
    while True:
        left = idle_seconds - (time.monotonic() - last)
        try:
            async with asyncio.timeout(max(left, 0)):
                line = await response.content.readline()
        except TimeoutError:
            return "idle", longest
        if not line:
            return "closed", longest
        if line.startswith(b"data: "):
            data = line[6:]
        elif line == b"\n" and data:
            kind = json.loads(data)["type"]
            longest, last, data = max(longest, time.monotonic() - last), time.monotonic(), b""
            if kind in ("response.completed", "response.failed"):
                return kind, longest


@pytest.mark.parametrize("path", [RESPONSES])
async def test_a_reader_whose_idle_timer_counts_parsed_events_outlasts_the_hold(
    tmp_path: Path, path: str
) -> None:
    """Its limit is a 150th of the real one of 300 s, and the hold longer than that."""
    async with one_slot(tmp_path) as here:
        await two_that_share(here)
        here.fake.faults.restore_seconds = 4.8
        body = document(path, "CANARY-gamma, speak")
        await here.proxy.post(path, {**body, "stream": False}, X_Session_Id="gamma")
        await here.proxy.turn(Talk("beta"))
        async with here.proxy.client.post(path, json=body, headers={"X-Session-Id": "gamma"}) as response:
            assert response.headers["X-KVProxy-Outcome"] == "pending"
            ending, longest = await read_parsed(response, idle_seconds=2)
        assert ending == "response.completed"
        assert longest < 2


async def test_an_official_library_reads_a_held_response(tmp_path: Path) -> None:
    """Its helper refuses any event before `response.created`, so it hears comments."""
    async with one_slot(tmp_path) as here:
        await two_that_share(here)
        here.fake.faults.save_seconds = here.fake.faults.restore_seconds = HELD_SECONDS
        await here.proxy.turn(Talk("beta"))
        response, raw = await ask(
            here, RESPONSES, "CANARY-gamma", **{"X-Session-Id": "gamma", "x-stainless-lang": "python"}
        )
        assert response.headers["X-KVProxy-Outcome"] == "pending"
        assert raw.lstrip(b":\n").startswith(b"event: response.created")


async def test_a_message_is_kept_waiting_with_pings(tmp_path: Path) -> None:
    async with one_slot(tmp_path) as here:
        await here.proxy.turn(Talk("beta"))
        here.fake.faults.save_seconds = HELD_SECONDS
        response, raw = await ask(here, MESSAGES, "CANARY-gamma", **{"X-Session-Id": "gamma"})
        assert response.status == 200
        assert raw.startswith(b'event: ping\ndata: {"type":"ping"}\n\n' * 2)
        assert raw.rstrip().endswith(b'data: {"type":"message_stop"}')
