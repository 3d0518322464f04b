"""Clients that leave, at each point of a request's way, politely or not.

After each: the upstream's connection is closed at once, the slot is nobody's until it was seen idle, no
lease stays out, no task stays behind, and nothing ever met anything else in a slot.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvproxy.telemetry.events import RequestFailed
from tests.support.proxy import House, house
from tests.support.raw import Wire, connection
from tests.support.talk import Talk

SOON = 2.5
"""Seconds that a machine busy with other things may take for what is done at once. What would else end a
request takes longer."""

Leave = Callable[[Wire], None]
LEAVE: dict[str, Leave] = {"fin": Wire.close, "rst": Wire.reset}

by_any_way = pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE)
whole_or_streamed = pytest.mark.parametrize(
    ("leave", "stream"), [(Wire.close, False), (Wire.reset, True)], ids=["whole", "stream"]
)


@asynccontextmanager
async def asking(here: House, talk: Talk, **body: Any) -> AsyncIterator[Wire]:
    """A client that has sent one turn and reads nothing by itself."""
    raw = json.dumps(talk.body(**body)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Session-Id: {talk.name}\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    async with connection(here.proxy.port) as wire:
        await wire.send(head.encode() + raw)
        yield wire


async def closed_upstream(here: House) -> None:
    await here.proxy.until(lambda: here.open_requests == 0, SOON)


def failures(here: House) -> list[str]:
    return [event.source for event in here.proxy.heard(RequestFailed)]


@by_any_way
async def test_a_client_that_leaves_the_line_never_reaches_the_server(tmp_path: Path, leave: Leave) -> None:
    async with house(tmp_path, token_delay=0.005) as here:
        async with here.proxy.stream(Talk("alpha", predict=60)) as running:
            await running.first()
            async with asking(here, Talk("beta")) as wire:
                await here.proxy.until(lambda: here.proxy.runtime.desk.waiting == 1)
                leave(wire)
                await here.proxy.until(lambda: here.proxy.runtime.desk.waiting == 0, SOON)
            await running.rest()
        await here.proxy.at_rest()
        assert here.completions() == 1
        assert here.deeds == []
        assert failures(here) == ["client"]


@by_any_way
async def test_a_client_that_leaves_during_the_save_of_a_switch_leaves_a_whole_snapshot(
    tmp_path: Path, leave: Leave
) -> None:
    async with house(tmp_path, save_seconds=4) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        async with asking(here, Talk("beta")) as wire:
            await here.proxy.until(lambda: here.proxy.slot_states == ["saving"])
            leave(wire)
            await here.proxy.until(lambda: failures(here) == ["client"], SOON)
            assert here.proxy.runtime.desk.out == 1
        await here.proxy.at_rest()
        assert here.completions() == 1
        assert len(here.files) == 1
        assert (await here.proxy.turn(a)).told == ("restored", None)


@by_any_way
async def test_a_client_that_leaves_during_its_restore_finds_it_done_when_it_comes_back(
    tmp_path: Path, leave: Leave
) -> None:
    async with house(tmp_path, restore_seconds=4) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        await here.proxy.turn(b)
        async with asking(here, a) as wire:
            await here.proxy.until(lambda: here.proxy.slot_states == ["restoring"])
            leave(wire)
            await here.proxy.until(lambda: failures(here) == ["client"], SOON)
        await here.proxy.at_rest()
        assert here.completions() == 2
        here.forget_calls()
        back = await here.proxy.turn(a)
        assert (back.told, here.deeds) == (("resident", None), [])
        assert back.reused > back.computed


@whole_or_streamed
async def test_a_client_that_leaves_before_any_header_frees_the_slot_only_once_it_was_seen_idle(
    tmp_path: Path, leave: Leave, stream: bool
) -> None:
    """The server cannot even take the request up, nor notice that its client has left: another prompt holds
    its loop, and when that is done it starts what was dropped long ago."""
    async with house(tmp_path, slots=2, prefill_rate=2000, http_poll=1.0) as here:
        big, small = Talk("alpha", words=100, predict=2), Talk("beta", predict=2)
        other = asyncio.create_task(here.proxy.turn(big))
        await here.proxy.until(lambda: len(here.processing) == 1)
        async with asking(here, small, stream=stream) as wire:
            await here.proxy.until(lambda: here.completions() == 2)
            leave(wire)
            await here.proxy.until(lambda: here.open_requests == 1, SOON)
        await here.proxy.until(lambda: "cancelling" in here.proxy.slot_states)
        assert here.proxy.runtime.desk.out == 1
        assert (await here.proxy.turn(small)).status == 200
        assert (await other).status == 200


@by_any_way
async def test_a_client_that_leaves_a_long_prefill_finds_it_again_when_it_retries(
    tmp_path: Path, leave: Leave
) -> None:
    async with house(tmp_path, slow_first_token=30) as here:
        a = Talk("alpha", words=20, predict=4)
        async with asking(here, a, stream=True) as wire:
            await wire.head()
            leave(wire)
            await closed_upstream(here)
        await here.proxy.until(lambda: here.proxy.slot_states == ["cancelling"])
        granted = here.completions()
        here.fake.faults.slow_first_token = 0
        retry = await here.proxy.turn(a)
        assert granted == 1
        assert retry.told == ("resident", None)
        assert retry.computed <= 2
        assert here.deeds == []


@by_any_way
async def test_a_slot_of_a_dropped_request_is_given_to_nobody_before_it_was_seen_idle(
    tmp_path: Path, leave: Leave
) -> None:
    async with house(tmp_path, slow_first_token=30, http_poll=0.4) as here:
        async with asking(here, Talk("alpha"), stream=True) as wire:
            await wire.head()
            leave(wire)
            await closed_upstream(here)
        waiting = asyncio.create_task(here.proxy.turn(Talk("beta")))
        await here.proxy.until(lambda: here.proxy.runtime.desk.waiting == 1)
        assert (here.proxy.slot_states, here.processing) == (["cancelling"], [0])
        here.fake.faults.slow_first_token = 0
        assert (await waiting).status == 200
        assert here.fake.max_concurrent_on_slot == 1


@by_any_way
async def test_a_client_that_leaves_mid_stream_stops_the_server_and_may_go_on_from_there(
    tmp_path: Path, leave: Leave
) -> None:
    async with house(tmp_path, token_delay=0.005) as here:
        a = Talk("alpha", predict=1000)
        async with asking(here, a, stream=True) as wire:
            await wire.until(b"CANARY"[:1])
            for _ in range(5):
                await wire.until(b"\n\n")
            leave(wire)
            await closed_upstream(here)
        await here.proxy.until(lambda: here.processing == [])
        here.fake.faults.token_delay = 0
        retry = await here.proxy.turn(Talk("alpha", predict=4))
        assert retry.told == ("resident", None)
        assert retry.computed <= 2
        await here.proxy.at_rest()
        assert failures(here) == ["client"]


async def test_a_conversation_that_was_cut_off_is_saved_at_a_switch_and_comes_back(tmp_path: Path) -> None:
    async with house(tmp_path, token_delay=0.005) as here:
        a = Talk("alpha", predict=1000)
        async with here.proxy.stream(a) as stream:
            await stream.first()
        here.fake.faults.token_delay = 0
        await here.proxy.turn(Talk("beta"))
        back = await here.proxy.turn(Talk("alpha", predict=4))
        assert back.told == ("restored", None)
        assert back.computed <= 2


@by_any_way
async def test_an_unpinned_client_that_leaves_gives_back_every_slot_it_might_have_run_in(
    tmp_path: Path, leave: Leave
) -> None:
    async with house(tmp_path, slots=2, token_delay=0.005) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        body = json.dumps({"messages": a.messages, "max_tokens": 1000, "stream": True}).encode()
        head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        async with connection(here.proxy.port) as wire:
            await wire.send(head.encode() + body)
            await wire.until(b"event: content_block_delta")
            leave(wire)
            await here.proxy.until(lambda: here.open_requests == 0, SOON)
        await here.proxy.at_rest()
        assert set(here.proxy.slot_states) <= {"idle", "resident"}
        assert (await here.proxy.turn(Talk("beta"))).status == 200


LAST_WORDS = {
    "/v1/chat/completions": b"[DONE]",
    "/v1/completions": b"[DONE]",
    "/completion": b'"stop_type"',
    "/v1/responses": b"response.completed",
    "/v1/messages": b"message_stop",
}


def question(path: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": "CANARY-alpha and so it goes on"}]
    if path.endswith(("completions", "completion")) and "chat" not in path:
        return {"prompt": turns[0]["content"]}
    return {"input" if path.endswith("responses") else "messages": turns}


@by_any_way
@pytest.mark.parametrize("path", LAST_WORDS)
async def test_a_client_that_leaves_with_its_whole_answer_has_missed_nothing(
    tmp_path: Path, leave: Leave, path: str
) -> None:
    """Many do not wait for the end of the message, which comes a moment after the last event."""
    async with house(tmp_path, slow_end=5) as here:
        body = json.dumps({**question(path), "max_tokens": 4, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-Session-Id: alpha\r\n"
        async with connection(here.proxy.port) as wire:
            await wire.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await wire.until(LAST_WORDS[path])
            leave(wire)
            await here.proxy.until(lambda: here.open_requests == 0, SOON)
        await here.proxy.at_rest()
        assert failures(here) == []
        assert [(done.generated_tokens, done.status) for done in here.proxy.done] == [(4, 200)]
        assert here.proxy.slot_states == ["resident"]


async def test_a_client_that_leaves_while_the_body_is_read_leaves_no_trace(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        async with connection(here.proxy.port) as wire:
            await wire.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{"
            )
            await asyncio.sleep(0.05)
            wire.reset()
        await here.proxy.at_rest()
        assert here.completions() == 0


async def test_clients_that_leave_at_random_moments_never_disturb_the_others(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, mix_on_busy=True, token_delay=0.001, http_poll=0.02) as here:

        async def rude(number: int) -> None:
            for step in range(6):
                talk = Talk(f"rude{number}", predict=200)
                async with asking(here, talk, stream=bool(step % 2)) as wire:
                    await asyncio.sleep(0.013 * (1 + (number + step) % 4))
                    LEAVE["rst" if step % 3 else "fin"](wire)

        async def polite(number: int) -> None:
            talk = Talk(f"polite{number}", predict=12)
            for _ in range(4):
                assert (await here.proxy.turn(talk)).status == 200

        await asyncio.gather(*(rude(n) for n in range(3)), *(polite(n) for n in range(2)))
        await here.proxy.at_rest()
        assert here.fake.max_concurrent_on_slot == 1
