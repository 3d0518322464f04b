"""Conversations without an id or under one that they share, in any order, with all that goes wrong between.

The fake's words tell whose content it answered from, so an answer that is not its own conversation's is seen.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.proxy import House, house
from tests.support.talk import Answer

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are a helper. " * 80}
SHARED = {"X-Session-Id": "shared"}


@dataclass
class Chat:
    """`said` ends with what is asked next; `sessions` are those that answered it."""

    name: str
    headers: dict[str, str]
    said: list[dict[str, str]] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)
    computed: int = 0
    fresh: int = 0
    """Characters that had to be computed even in a slot of its own."""

    def __post_init__(self) -> None:
        self.said = [SYSTEM, {"role": "user", "content": f"CANARY-{self.name} first"}]

    @property
    def size(self) -> int:
        return sum(len(turn["content"]) for turn in self.said)

    def body(self, **more: Any) -> dict[str, Any]:
        return {"messages": self.said, "max_tokens": 12, **more}

    def heard(self, answer: Answer) -> None:
        assert answer.status == 200
        word = f"CANARY-{self.name} "
        assert (word * 3).startswith(answer.text), f"{word} was answered {answer.text!r}"
        self.sessions.add(answer.headers["X-KVProxy-Session"])
        self.computed += answer.body["timings"]["prompt_n"]
        self.said += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"go on {len(self.said)}"},
        ]


async def live(here: House, chat: Chat, chooser: random.Random, turns: int) -> None:
    for _ in range(turns):
        deed = chooser.random()
        if deed < 0.15 and len(chat.said) > 4:
            chat.said[-1] = {"role": "user", "content": f"edited {chooser.random()}"}
        elif deed < 0.25 and len(chat.said) > 4:
            chat.said = chat.said[:-2]  # the last answer is generated anew
        elif deed < 0.35:
            await leave(here, chat)
        await asyncio.sleep(chooser.random() * 0.01)
        chat.heard(await here.proxy.post(CHAT, chat.body(), **chat.headers))


async def leave(here: House, chat: Chat) -> None:
    """Ask, and go when the answer begins."""
    async with here.proxy.client.post(CHAT, json=chat.body(stream=True), headers=chat.headers) as response:
        await response.content.readany()
        response.close()


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("seed", range(4))
async def test_each_is_answered_from_its_own_content_and_stays_itself(
    tmp_path: Path, seed: int, slots: int
) -> None:
    chooser = random.Random(seed)
    async with house(tmp_path, slots=slots, mix_on_busy=True, token_delay=0.0005) as here:
        chats = [Chat(f"c{n}", SHARED if n % 2 else {}) for n in range(6)]
        for _ in range(3):
            await asyncio.gather(*(live(here, chat, random.Random(chooser.random()), 3) for chat in chats))
            if chooser.random() < 0.5:
                await here.proxy.drain()
                await here.proxy.restart()
            if chooser.random() < 0.5:
                await here.fake.restart()
            await here.proxy.ready()
        assert here.fake.max_concurrent_on_slot == 1
        everybody = [session for chat in chats for session in chat.sessions]
        assert len(everybody) == len(set(everybody)), "two conversations in one session"
        assert all(len(chat.sessions) == 1 for chat in chats)


@pytest.mark.parametrize("headers", [{}, SHARED])
async def test_nobody_computes_more_than_in_a_slot_of_its_own(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    """Any order of turns, more conversations than slots: each prompt costs what is new in it, and a snapshot
    misses no more than its last turn."""
    chooser = random.Random(7)
    async with house(tmp_path, slots=2) as here:
        chats = [Chat(f"c{n}", headers) for n in range(5)]
        for turn in range(40):
            chat = chooser.choice(chats)
            is_first = not chat.sessions
            before, size = chat.computed, chat.size
            chat.heard(await here.proxy.post(CHAT, chat.body(), **headers))
            allowed = size + 100 if is_first else 120
            assert chat.computed - before <= allowed, f"turn {turn} of {chat.name}"
