"""What is kept of requests in memory once they were answered: no more than the slots can need."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvproxy.sessions.session import Session
from tests.support.proxy import House, house
from tests.support.talk import Talk

SLOTS = 2
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def held(here: House) -> list[Session]:
    """The sessions of which a whole request is kept."""
    known = here.proxy.runtime.registry.all()
    return [one for one in known if one.asked is not None or one.turn is not None]


async def converse(here: House, path: str) -> None:
    """Eight conversations of two requests, whose clients leave in the third."""
    for name in "abcdefgh":
        talk = Talk(name)
        for _ in range(2):
            assert (await here.proxy.post(path, talk.body(), **talk.headers)).status == 200
        async with here.proxy.stream(talk) as stream:
            await stream.first()
    await here.proxy.at_rest()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_of_memory_that_cannot_roll_back_one_request_is_kept_for_each_slot(
    tmp_path: Path, path: str
) -> None:
    async with house(tmp_path, slots=SLOTS, token_delay=0.001, upstream={"memory_kind": "hybrid"}) as here:
        await converse(here, path)
        assert len(here.proxy.runtime.registry) >= 8
        assert 0 < len(held(here)) <= SLOTS


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_of_full_attention_none_is_kept(tmp_path: Path, path: str) -> None:
    async with house(tmp_path, slots=SLOTS, token_delay=0.001, upstream={"memory_kind": "full"}) as here:
        here.proxy.runtime.restorer.cutter.least_seconds = 0
        assert here.proxy.runtime.restorer.cutter.is_wanted
        await converse(here, path)
        assert len(here.proxy.runtime.registry) >= 8
        assert held(here) == []


async def test_a_turn_is_remembered_by_its_own_request_though_the_next_one_waits(tmp_path: Path) -> None:
    async with house(tmp_path, token_delay=0.005, upstream={"memory_kind": "hybrid"}) as here:
        async with here.proxy.stream(Talk("a")) as stream:
            await stream.first()
            waits = asyncio.create_task(here.proxy.post(CHAT, Talk("a").body(), **Talk("a").headers))
            await here.proxy.until(lambda: here.proxy.runtime.desk.waiting == 1)
            await stream.rest()
            (session,) = here.proxy.runtime.registry.all()
            await here.proxy.until(lambda: session.turn is not None)
            assert session.turn is not None
            assert session.turn.asked.document.get("stream") is True
        await waits
