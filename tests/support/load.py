"""Conversations as a chat client has them, one or many, and what became of their prompts."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Message = dict[str, str]
Body = dict[str, Any]

CHAT = "/v1/chat/completions"
WORDS = (
    "amber basalt cedar drift ember fjord granite harbour iris juniper kelp lantern marble north oak "
    "pebble quartz reed slate thistle umber violet willow yarrow zephyr"
).split()


def words(seed: object, count: int) -> str:
    """`count` words that are always the same for one seed."""
    chooser = random.Random(str(seed))
    return " ".join(chooser.choice(WORDS) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Answer:
    """`computed` and `reused` are prompt tokens as the server counted them; `first_at` and `ended_at` are
    seconds after the request was sent, `first_at` that of the first word."""

    status: int
    headers: dict[str, str]
    text: str
    computed: int
    reused: int
    first_at: float
    ended_at: float

    @property
    def prompt(self) -> int:
        return self.computed + self.reused

    @property
    def outcome(self) -> str:
        return self.headers.get("x-kvproxy-outcome", "")

    @property
    def reason(self) -> str:
        return self.headers.get("x-kvproxy-reason", "")


@asynccontextmanager
async def client(base_url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that makes a new connection for each request, so that no test depends on an old one."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:
        yield session


async def ask(session: aiohttp.ClientSession, body: Body, headers: dict[str, str]) -> Answer:
    """One streamed chat request, read to its end."""
    began = time.perf_counter()
    async with session.post(CHAT, json=body | {"stream": True}, headers=headers) as response:
        lines = [(time.perf_counter() - began, line) async for line in response.content]
        head = {name.lower(): value for name, value in response.headers.items()}
    ended = time.perf_counter() - began
    data = [(at, line[6:]) for at, line in lines if line.startswith(b"data: {")]
    chunks = [(at, json.loads(line)) for at, line in data]
    timings = next((chunk["timings"] for _, chunk in chunks if "timings" in chunk), {})
    said = [(at, content) for at, chunk in chunks if (content := _content(chunk))]
    return Answer(
        response.status,
        head,
        "".join(content for _, content in said),
        timings.get("prompt_n", 0),
        timings.get("cache_n", 0),
        said[0][0] if said else ended,
        ended,
    )


def _content(chunk: Body) -> str:
    return "".join(choice.get("delta", {}).get("content") or "" for choice in chunk.get("choices", []))


@dataclass(slots=True)
class Conversation:
    """One conversation with its history. `extra` goes into every body, `headers` with every request, and its
    name as its id, unless it has none."""

    name: str
    messages: list[Message]
    max_tokens: int = 8
    extra: Body = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    has_id: bool = True

    @classmethod
    def about(cls, name: str, word_count: int = 300, **more: Any) -> Conversation:
        """A conversation about a document of its own."""
        document = {"role": "system", "content": f"Read this and answer. {words(name, word_count)}"}
        return cls(name, [document], **more)

    async def turn(self, session: aiohttp.ClientSession) -> Answer:
        """Ask the next question; a good answer joins the history."""
        question = f"Question {self.asked} of {self.name}: {words((self.name, self.asked), 20)}?"
        asked = [*self.messages, {"role": "user", "content": question}]
        body = {"model": "any", "messages": asked, "max_tokens": self.max_tokens, "temperature": 0}
        named = {"X-Session-Id": self.name} if self.has_id else {}
        answer = await ask(session, body | self.extra, named | self.headers)
        if answer.status == 200:
            self.asked += 1
            self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer


BeforeTurn = Callable[[int], Awaitable[None]]


async def nothing(turn: int) -> None:
    """What happens before a turn of a load when nothing does."""


async def run_load(
    base_url: str,
    conversations: Sequence[Conversation],
    *,
    turns: int = 3,
    concurrency: int = 1,
    before_turn: BeforeTurn = nothing,
) -> list[list[Answer]]:
    """All conversations take their turns side by side, at most `concurrency` at once; the answers by turn."""
    answers = []
    async with client(base_url) as session:
        for turn in range(turns):
            await before_turn(turn)
            gate = asyncio.Semaphore(concurrency)
            answers.append(await asyncio.gather(*(_gated(gate, c, session) for c in conversations)))
    return answers


async def _gated(gate: asyncio.Semaphore, one: Conversation, session: aiohttp.ClientSession) -> Answer:
    async with gate:
        return await one.turn(session)


def reuse_share(answers: Iterable[Answer]) -> float:
    """Reused prompt tokens as a share of all prompt tokens."""
    counted = list(answers)
    return sum(one.reused for one in counted) / max(1, sum(one.prompt for one in counted))
