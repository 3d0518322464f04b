"""What two coding agents were recorded to send, one request after another, and how to send it again.

The files hold real sizes, structure, headers and common beginnings. The wording was replaced by filler of the
same shape, and each text above 80 characters was cut to an eighth (arguments of tool calls are whole: the
server reads them). Each request carries the recorded answers to those before it, not what was answered here:
agents do rewrite their last turn.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.load import Answer, Body

FOLDER = Path(__file__).parent.parent / "recordings"
MAX_TOKENS = 4
OWN_HEADERS = {"accept", "accept-encoding", "content-type"}
"""Those that whoever sends a request makes anew."""


@dataclass(frozen=True, slots=True)
class Recorded:
    path: str
    headers: dict[str, str]
    body: Body

    @property
    def tools(self) -> list[Body]:
        """None in title calls, others in sub-agents than in the conversation that they work for."""
        tools: list[Body] = self.body.get("tools", [])
        return tools


@dataclass(frozen=True, slots=True)
class Recording:
    """The last request is one of the main conversation."""

    name: str
    requests: tuple[Recorded, ...]

    @property
    def main(self) -> list[Recorded]:
        """The requests of the conversation that a person leads: not of sub-agents, and no title calls."""
        return [one for one in self.requests if self.is_main(one)]

    @property
    def is_pinned(self) -> bool:
        """Whether its requests may say in which slot they are to run."""
        return not self.requests[-1].path.startswith("/v1/messages")

    def is_main(self, one: Recorded) -> bool:
        return one.tools == self.requests[-1].tools

    def __str__(self) -> str:
        return self.name


@functools.cache
def recordings() -> tuple[Recording, ...]:
    return tuple(_read(path) for path in sorted(FOLDER.glob("*.jsonl")))


def _read(path: Path) -> Recording:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Recording(path.stem, tuple(_recorded(line) for line in lines))


def _recorded(line: Body) -> Recorded:
    headers = {name: value for name, value in line["headers"] if name.lower() not in OWN_HEADERS}
    return Recorded(line["path"], headers, line["body"])


async def send(session: aiohttp.ClientSession, one: Recorded, *, streams: bool) -> Answer:
    """Send it as it was recorded, but for its length and whether it streams."""
    body = one.body | {"stream": streams, "max_tokens": MAX_TOKENS}
    if not streams:
        body.pop("stream_options", None)
    async with session.post(one.path, json=body, headers=one.headers) as response:
        parts = [part async for part in _parts(response, streams=streams)]
        head = {name.lower(): value for name, value in response.headers.items()}
    computed, reused = _prompt_tokens(parts)
    return Answer(response.status, head, "", computed, reused, 0.0, 0.0)


async def _parts(response: aiohttp.ClientResponse, *, streams: bool) -> AsyncIterator[Body]:
    if not streams:
        yield await response.json()
        return
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _prompt_tokens(parts: list[Body]) -> tuple[int, int]:
    """How many were computed and how many reused, in whichever way the endpoint says it."""
    for part in parts:
        if "timings" in part:
            return part["timings"]["prompt_n"], part["timings"]["cache_n"]
        usage: dict[str, Any] = part.get("message", part).get("usage") or {}
        if "cache_read_input_tokens" in usage:
            return usage["input_tokens"], usage["cache_read_input_tokens"]
    raise AssertionError(f"no answer: {parts[:2]}")
