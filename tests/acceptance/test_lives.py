"""The server falls asleep, or dies in the middle of an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.acceptance.conftest import SetStage, Stage
from tests.support.load import CHAT, Conversation, client

pytestmark = pytest.mark.real

TWO_SLOTS = ("-c", "16384", "-np", "2", "--cache-ram", "0")
SOON_SAVED = ("checkpoint.on_idle_seconds=1",)


async def until_state(stage: Stage, state: str, seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while await state_of(stage) != state:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.05)


async def state_of(stage: Stage) -> str:
    servers: list[dict[str, Any]] = (await stage.kvproxy.status())["servers"]
    return str(servers[0]["state"])


async def test_a_server_that_slept_has_lost_its_slots_and_gets_them_back(set_stage: SetStage) -> None:
    """Sleep empties the slots of the same process. Looking at it must not wake it."""
    stage = await set_stage(*TWO_SLOTS, "--sleep-idle-seconds", "2", settings=SOON_SAVED)
    one = Conversation.about("sleeper")
    async with client(stage.url) as session:
        before = await one.turn(session)
        await stage.kvproxy.until_saved()
        await until_state(stage, "sleeping")
        await asyncio.sleep(3)
        assert await state_of(stage) == "sleeping"
        after = await one.turn(session)
    assert (after.status, after.outcome) == (200, "restored")
    assert after.reused >= before.prompt


async def test_a_server_killed_in_mid_answer_leaves_a_broken_body_and_the_session_whole(
    set_stage: SetStage,
) -> None:
    stage = await set_stage(*TWO_SLOTS)
    one = Conversation.about("listener")
    async with client(stage.url) as session:
        before = await one.turn(session)
        await stage.kvproxy.flush()
        wish = {"messages": one.messages, "max_tokens": 5000, "stream": True}
        async with session.post(CHAT, json=wish, headers={"X-Session-Id": one.name}) as response:
            assert b"data: " in await response.content.readline()
            await stage.llama.kill()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await stage.llama.start()
        after = await one.turn(session)
    assert (after.status, after.outcome) == (200, "restored")
    assert after.reused >= before.prompt
    (failed,) = await stage.kvproxy.until_events("kv.request.failed", 1)
    assert failed["source"] == "upstream"


async def test_an_absent_server_is_told_and_served_as_soon_as_it_comes(set_stage: SetStage) -> None:
    stage = await set_stage(*TWO_SLOTS)
    await stage.llama.kill()
    await stage.kvproxy.stop()
    await stage.kvproxy.start(wait_for_server=False)
    one = Conversation.about("early")
    async with client(stage.url) as session:
        refused = await one.turn(session)
        assert refused.status in (502, 503)
        assert refused.headers["x-kvproxy-error"] == "KV_BACKEND_UNAVAILABLE"
        async with session.get("/kvproxy/readyz") as response:
            assert response.status == 503
        await stage.llama.start()
        served = await one.turn(session)
    assert served.status == 200
