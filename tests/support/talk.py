"""A conversation as an agent has it, and the answers to it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

FILLER = "and so it goes on and on "


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes
    body: Any
    """The decoded JSON; None for a stream or what is no JSON."""

    @property
    def text(self) -> str:
        """What the model said."""
        choice = self.body["choices"][0]
        said: str = choice["message"]["content"] if "message" in choice else choice["text"]
        return said

    @property
    def outcome(self) -> str | None:
        return self.headers.get("X-KVProxy-Outcome")

    @property
    def reason(self) -> str | None:
        return self.headers.get("X-KVProxy-Reason")

    @property
    def told(self) -> tuple[str | None, str | None]:
        return self.outcome, self.reason

    @property
    def slot(self) -> str | None:
        return self.headers.get("X-KVProxy-Slot")

    @property
    def code(self) -> str | None:
        return self.headers.get("X-KVProxy-Error")

    @property
    def reused(self) -> int:
        count: int = self.body["timings"]["cache_n"]
        return count

    @property
    def computed(self) -> int:
        count: int = self.body["timings"]["prompt_n"]
        return count


async def answer_of(response: aiohttp.ClientResponse) -> Answer:
    raw = await response.read()
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    return Answer(response.status, dict(response.headers), raw, body)


class Stream:
    """A streamed answer under way."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.raw = b""

    @property
    def told(self) -> tuple[str | None, str | None]:
        headers = self.response.headers
        return headers.get("X-KVProxy-Outcome"), headers.get("X-KVProxy-Reason")

    @property
    def slot(self) -> str | None:
        return self.response.headers.get("X-KVProxy-Slot")

    async def first(self) -> None:
        self.raw += await self.response.content.readany()

    async def rest(self) -> str:
        """Read to the end; what the model said in all."""
        self.raw += await self.response.content.read()
        return text_of_stream(self.raw)


def text_of_stream(raw: bytes) -> str:
    data = (line[6:] for line in raw.decode().splitlines() if line.startswith("data: {"))
    choices = (choice for event in data for choice in json.loads(event).get("choices", ()))
    return "".join(choice.get("delta", {}).get("content") or choice.get("text") or "" for choice in choices)


@dataclass(slots=True)
class Talk:
    """`name` is the session's id and its canary: every right answer to it says that word and no other."""

    name: str
    words: int = 5
    predict: int = 24
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages.append({"role": "user", "content": f"{self.canary} {FILLER * self.words}"})

    @property
    def canary(self) -> str:
        return f"CANARY-{self.name}"

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Session-Id": self.name}

    def body(self, **more: Any) -> dict[str, Any]:
        return {"messages": list(self.messages), "max_tokens": self.predict, **more}

    def heard(self, text: str) -> None:
        """Take the answer into the conversation, with what is said to it."""
        assert self.is_mine(text), f"{self.canary} was answered {text!r}"
        self.messages.append({"role": "assistant", "content": text})
        self.messages.append({"role": "user", "content": f"go on, {FILLER}"})

    def is_mine(self, text: str) -> bool:
        """Whether an answer holds this conversation's canary and nobody else's."""
        return bool(text) and (f"{self.canary} " * (len(text) // 4 + 1)).startswith(text)
