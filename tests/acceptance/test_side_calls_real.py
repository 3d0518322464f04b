"""Four conversations on two slots, every turn followed by a title call under the same id, and a conversation
over `/v1/messages` beside: what of their prompts the conversations get back, with and without the rule."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.acceptance.conftest import Measured, SetStage, Stage
from tests.acceptance.test_messages_real import Letters
from tests.support.load import Answer, Conversation, ask, client, words

pytestmark = [pytest.mark.real, pytest.mark.slow]

TWO_SLOTS = ("-c", "24576", "-np", "2", "--cache-ram", "0")
ONE_SLOT = ("-c", "12288", "-np", "1", "--cache-ram", "0")
CONVERSATIONS = 4
TURNS = 4
TOOLS = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
]
LEAST_REUSE = 0.90


def title_of(one: Conversation) -> dict[str, Any]:
    """As OpenCode asks for one."""
    system = "You are a title generator. You output ONLY a thread title. Nothing else.\n" + words("rules", 60)
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "Generate a title for this conversation:\n"},
            {"role": "user", "content": json.dumps(one.messages[1]["content"])},
        ],
        "max_tokens": 8,
        "temperature": 0,
    }


@dataclass(slots=True)
class Load:
    """`computed` and `prompt` are tokens of the conversations' turns after their first."""

    prompt: int = 0
    computed: int = 0
    side: list[Answer] = field(default_factory=list)

    def count(self, computed: int, reused: int) -> None:
        self.prompt += computed + reused
        self.computed += computed

    @property
    def reuse(self) -> float:
        return 1 - self.computed / self.prompt


async def talk(session: aiohttp.ClientSession, one: Conversation, load: Load) -> None:
    for number in range(TURNS):
        answer = await one.turn(session)
        assert answer.status == 200
        if number:
            load.count(answer.computed, answer.reused)
        load.side.append(await ask(session, title_of(one), {"X-Session-Id": one.name}))


async def write(session: aiohttp.ClientSession, letters: Letters, load: Load) -> None:
    for number in range(TURNS):
        reply = await letters.turn(session)
        if number:
            load.count(reply.computed, reply.reused)


async def run(stage: Stage) -> Load:
    load = Load()
    talks = [Conversation.about(f"talk {n}", extra={"tools": TOOLS}) for n in range(CONVERSATIONS)]
    letters = Letters("letters")
    async with client(stage.url) as session:
        await asyncio.gather(*(talk(session, one, load) for one in talks), write(session, letters, load))
    return load


def _saves(stage: Stage) -> str:
    saved = [int(event["bytes"]) for event in stage.kvproxy.events("kv.session.save.success")]
    return f"{len(saved)} saves of {sum(saved) / 1e6:.0f} MB"


@pytest.mark.parametrize("flags", [TWO_SLOTS, ONE_SLOT], ids=["two slots", "one slot"])
async def test_title_calls_cost_the_conversations_nothing(
    set_stage: SetStage, measured: Measured, flags: tuple[str, ...]
) -> None:
    stage = await set_stage(*flags, settings=("logging.level=debug",))
    load = await run(stage)
    marks = {event["mark"] for event in stage.kvproxy.events("kv.request.auxiliary")}
    measured(
        f"{CONVERSATIONS} conversations on {flags[3]} slots, a title call after each turn, one over "
        f"/v1/messages beside: {load.reuse:.4f} of their later prompts reused, {_saves(stage)}"
    )
    assert {answer.outcome for answer in load.side} == {"auxiliary"}
    assert marks <= {"OpenCode, Kilo (title)", "no tools"}
    assert load.reuse >= LEAST_REUSE


async def test_without_the_rule_the_same_load_is_measured_for_comparison(
    set_stage: SetStage, measured: Measured
) -> None:
    stage = await set_stage(*TWO_SLOTS, settings=("auxiliary.recognise=false",))
    load = await run(stage)
    measured(f"the same on 2 slots without the rule: {load.reuse:.4f} reused, {_saves(stage)}")
    assert "auxiliary" not in {answer.outcome for answer in load.side}


async def test_plain_llama_server_under_the_same_load_is_measured_for_comparison(
    set_stage: SetStage, measured: Measured
) -> None:
    """The server itself, which is what the figures are to be read against."""
    stage = await set_stage(*TWO_SLOTS)
    load = Load()
    talks = [Conversation.about(f"talk {n}", extra={"tools": TOOLS}) for n in range(CONVERSATIONS)]
    async with client(stage.llama.base_url) as session:
        await asyncio.gather(*(talk(session, one, load) for one in talks))
    measured(f"the same against llama-server alone (without /v1/messages): {load.reuse:.4f} reused")
