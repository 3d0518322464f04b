"""Conversations over `/v1/messages`, whose slot the server chooses, on the real server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from tests.acceptance.conftest import Measured, SetStage, Stage
from tests.support.load import Conversation, client, words

pytestmark = pytest.mark.real

TWO_SLOTS = ("-c", "16384", "-np", "2", "--cache-ram", "0")
FEW = 80
"""Tokens that a turn may have to compute: its question, and the end of the prompt."""


@dataclass(frozen=True, slots=True)
class Reply:
    outcome: str
    computed: int
    reused: int

    @property
    def prompt(self) -> int:
        return self.computed + self.reused


@dataclass(slots=True)
class Letters:
    """As Claude Code writes them: system blocks, text blocks, streamed."""

    name: str
    count: int = 300
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def turn(self, session: aiohttp.ClientSession) -> Reply:
        question = f"{self.name} {len(self.messages)}: {words((self.name, len(self.messages)), 5)}?"
        asked = [*self.messages, {"role": "user", "content": [{"type": "text", "text": question}]}]
        body = {
            "model": "any",
            "max_tokens": 8,
            "temperature": 0,
            "stream": True,
            "system": [{"type": "text", "text": words(self.system or self.name, self.count)}],
            "messages": asked,
        }
        async with session.post("/v1/messages?beta=true", json=body, headers=self.headers) as response:
            assert response.status == 200, await response.text()
            events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
            outcome = response.headers["X-KVProxy-Outcome"]
        usage = events[0]["message"]["usage"]
        text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
        self.messages = [*asked, {"role": "assistant", "content": [{"type": "text", "text": text}]}]
        return Reply(outcome, usage["input_tokens"], usage.get("cache_read_input_tokens", 0))

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Session-Id": self.name}


async def verdicts(stage: Stage, count: int) -> list[str]:
    done = await stage.kvproxy.until_events("kv.request.done", count)
    return [str(event["verdict"]) for event in done if event["endpoint"] == "messages"]


async def test_a_conversation_keeps_its_slot_beside_pinned_ones(
    set_stage: SetStage, measured: Measured
) -> None:
    stage = await set_stage(*TWO_SLOTS)
    letters, other = Letters("letters"), Conversation.about("other")
    async with client(stage.url) as session:
        replies = []
        for _ in range(4):
            replies.append(await letters.turn(session))
            assert (await other.turn(session)).status == 200
    assert [reply.outcome for reply in replies] == ["cold", *["resident"] * 3]
    assert max(reply.computed for reply in replies[1:]) <= FEW
    assert await verdicts(stage, 8) == ["unknown", *["confirmed"] * 3]
    measured(f"/v1/messages beside pinned turns: computed {[reply.computed for reply in replies]}")


async def test_a_conversation_survives_switches_and_a_restart(
    set_stage: SetStage, measured: Measured
) -> None:
    stage = await set_stage(*TWO_SLOTS)
    letters = Letters("letters")
    others = [Conversation.about(f"other {n}") for n in range(2)]
    async with client(stage.url) as session:
        await letters.turn(session)
        await asyncio.gather(*(one.turn(session) for one in others))
        switched = await letters.turn(session)
        async with session.post("/kvproxy/flush") as response:
            assert response.status == 200
        await stage.llama.kill()
        await stage.llama.start()
        restarted = await letters.turn(session)
    assert [switched.outcome, restarted.outcome] == ["restored", "restored"]
    assert max(switched.computed, restarted.computed) <= FEW
    measured(
        f"/v1/messages: computed {switched.computed} of {switched.prompt} after a switch, "
        f"{restarted.computed} of {restarted.prompt} after a restart"
    )


async def test_two_that_share_a_system_prompt_do_not_trample_each_other(
    set_stage: SetStage, measured: Measured
) -> None:
    """Left to itself the server gives the second the slot of the first, and so on by turns."""
    stage = await set_stage(*TWO_SLOTS)
    alike = [Letters("first", system="shared"), Letters("second", system="shared")]
    async with client(stage.url) as session:
        replies = [await one.turn(session) for _ in range(3) for one in alike]
    later = replies[2:]
    assert max(reply.computed for reply in later) <= FEW
    share = sum(reply.reused for reply in later) / sum(reply.prompt for reply in later)
    measured(f"two /v1/messages conversations with one system prompt: {share:.3f} reused")


async def test_exact_steering_leaves_one_token_to_the_server(set_stage: SetStage, measured: Measured) -> None:
    stage = await set_stage(*TWO_SLOTS, settings=("sessions.exact_messages=true",))
    letters = Letters("letters")
    async with client(stage.url) as session:
        replies = []
        for _ in range(3):
            replies.append(await letters.turn(session))
            await stage.kvproxy.flush()  # the file tells the kind of memory, which must make no difference
    assert [reply.computed for reply in replies] == [1, 1, 1]
    done = await stage.kvproxy.until_events("kv.request.done", 3)
    measured(f"exactly steered: computed {[event['computed'] for event in done]}, then 1 each by the server")
    assert [event["reused"] > 0 for event in done] == [False, True, True]
