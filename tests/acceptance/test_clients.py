"""Clients as they are: the official library, and people who close the window."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.acceptance.conftest import Measured, SetStage, Stage
from tests.support.load import CHAT, Conversation, ask, client

pytestmark = pytest.mark.real

ONE_SLOT = ("-c", "16384", "-np", "1", "--cache-ram", "0")


def library(stage: Stage, session: str) -> openai.AsyncOpenAI:
    """Unchanged but for its address and one header."""
    return openai.AsyncOpenAI(
        base_url=f"{stage.url}/v1", api_key="none", default_headers={"X-Session-Id": session}, max_retries=0
    )


async def test_the_openai_library_is_served_streaming_and_not(set_stage: SetStage) -> None:
    stage = await set_stage(*ONE_SLOT)
    async with library(stage, "one") as api:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "tell me of the sea " * 30}]
        whole = await api.chat.completions.create(model="any", messages=messages, max_tokens=8)
        text = whole.choices[0].message.content
        assert text
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 8
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and more"}]
        stream = await api.chat.completions.create(
            model="any", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= whole.usage.prompt_tokens
    done = await stage.kvproxy.until_events("kv.request.done", 2)
    assert [event["outcome"] for event in done] == ["cold", "resident"]


async def test_the_openai_library_finds_its_session_again_after_a_switch(
    set_stage: SetStage,
) -> None:
    stage = await set_stage(*ONE_SLOT)
    reused = []
    for name in ("one", "two", "one"):
        async with library(stage, name) as api:
            answer = await api.completions.create(model="any", prompt=f"{name} " * 200, max_tokens=1)
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            reused.append((details.cached_tokens or 0) if details else 0)
    done = await stage.kvproxy.until_events("kv.request.done", 3)
    assert [event["outcome"] for event in done] == ["cold", "cold", "restored"]
    assert reused[2] >= 0.95 * len("one " * 200)


async def test_the_openai_library_understands_our_errors(set_stage: SetStage) -> None:
    stage = await set_stage(*ONE_SLOT)
    await stage.llama.kill()
    async with library(stage, "one") as api:
        with pytest.raises(openai.InternalServerError) as caught:
            await api.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "KV_BACKEND_UNAVAILABLE"


LEAVE_SECONDS = 0.25
FIRST_LOOK_SECONDS = 1.6
"""The server notices after a second in which nobody got an answer of it, and one batch; kvproxy asks once in
that second. A test that looked often would keep the server from noticing."""
LONG = ("-c", "65536", "-np", "1", "--cache-ram", "0", "-b", "128", "-ub", "128")
LEAVER = {"X-Session-Id": "leaver"}


def much(prompt_words: int) -> dict[str, Any]:
    return {"messages": Conversation.about("leaver", prompt_words).messages, "max_tokens": 20_000}


async def read_until(stage: Stage, body: dict[str, Any], mark: bytes) -> None:
    async with (
        client(stage.url) as session,
        session.post(CHAT, json=body | {"stream": True}, headers=LEAVER) as response,
    ):
        async for line in response.content:
            if mark in line:
                return


async def closed_after(stage: Stage, left: float) -> float:
    """Seconds between leaving and the end of the connection to the server."""
    asked = stage.tap.last(CHAT)
    async with asyncio.timeout(5):
        while asked.client_left_at is None:  # noqa: ASYNC110 - noted by a callback of the wire
            await asyncio.sleep(0.005)
    return asked.client_left_at - left


async def is_busy(stage: Stage) -> bool:
    return any(slot["is_processing"] for slot in await stage.llama.slots())


async def test_a_client_that_leaves_before_the_first_word_is_gone_upstream_at_once(
    set_stage: SetStage, measured: Measured
) -> None:
    stage = await set_stage(*LONG)
    task = asyncio.ensure_future(read_until(stage, much(6000), b"never said"))
    await asyncio.sleep(1.0)
    assert await is_busy(stage), "the prompt is too short for this machine"
    left = time.perf_counter()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    closed = await closed_after(stage, left)
    measured(f"client left before the first word: upstream closed after {closed * 1000:.1f} ms")
    assert closed <= LEAVE_SECONDS
    await asyncio.sleep(FIRST_LOOK_SECONDS)
    assert not await is_busy(stage)
    await assert_served_again(stage)


async def test_a_client_that_leaves_in_mid_stream_is_gone_upstream_at_once(
    set_stage: SetStage, measured: Measured
) -> None:
    stage = await set_stage(*LONG)
    await read_until(stage, much(50), b'"content":"')
    left = time.perf_counter()
    closed = await closed_after(stage, left)
    measured(f"client left in mid-stream: upstream closed after {closed * 1000:.1f} ms")
    assert closed <= LEAVE_SECONDS
    await asyncio.sleep(0.25)
    assert not await is_busy(stage)
    await assert_served_again(stage)


async def assert_served_again(stage: Stage) -> None:
    body = {"messages": [{"role": "user", "content": "back again"}], "max_tokens": 2}
    async with client(stage.url) as session:
        again = await ask(session, body, LEAVER)
    assert again.status == 200
