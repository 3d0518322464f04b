"""One answer with all that tells whether it is right: what was claimed of it, counted, and found likely."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.support.judge import Spoken
from tests.support.load import CHAT, Message


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer, or the status of a refusal. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    spoken: Spoken
    reused: int
    computed: int

    @property
    def told(self) -> tuple[str, str]:
        """Outcome and reason."""
        return self.headers.get("x-kvproxy-outcome", ""), self.headers.get("x-kvproxy-reason", "")


async def say(
    session: aiohttp.ClientSession,
    messages: list[Message],
    headers: Mapping[str, str],
    tokens: int = 30,
    **more: Any,
) -> Heard:
    """`more` goes into the body."""
    wish = {"max_tokens": tokens, "temperature": 0, "stream": True, "logprobs": True, "top_logprobs": 6}
    async with session.post(CHAT, json={"messages": messages, **wish, **more}, headers=headers) as response:
        lines = [line async for line in response.content]
        head = {name.lower(): value for name, value in response.headers.items()}
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    choices = [choice for e in events for choice in e["choices"] if choice["delta"].get("content")]
    likely = [
        {one["id"]: one["logprob"] for one in token["top_logprobs"]}
        for choice in choices
        for token in choice["logprobs"]["content"]
    ]
    said = "".join(choice["delta"]["content"] for choice in choices)
    timings = next((event["timings"] for event in events if "timings" in event), {})
    reused, computed = timings.get("cache_n", 0), timings.get("prompt_n", 0)
    return Heard(response.status, head, Spoken(messages, said, likely), reused, computed)
