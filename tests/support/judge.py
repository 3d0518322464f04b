"""Was an answer computed from its own prompt and nothing else?

Random weights say no words that could betray another conversation, and greedy text differs with the shape of
a batch. But the probabilities of what might have been said tell. A server that has nothing else to do
computes them again. The difference (of logarithms, weighted by probability, the largest of some tokens) was
seen to be up to 0.0024 for the same prompt, from the shape of the batch alone; 0.09 and more for the prompt
of another conversation; 0.14 to 0.39 for streams that were really mixed, by pinning requests to busy slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tests.support.load import Message
from tests.support.real import LlamaServer

TOLERANCE = 0.01
NEVER = -20.0
NEAR_TIE = 0.02
"""By how much the most likely token may have missed its place for the shape of a batch."""

LogProbs = dict[int, float]


@dataclass(frozen=True, slots=True)
class Spoken:
    """One answer with what it was asked. `likely` has the logarithms by token id for each token said; empty
    where the API does not tell."""

    messages: list[Message]
    text: str
    likely: list[LogProbs]


class Judge:
    """Needs a server of its own with one slot."""

    def __init__(self, server: LlamaServer) -> None:
        self._server = server

    async def deviation(self, spoken: Spoken, positions: int = 8) -> float:
        """The largest difference at a few tokens of the answer, the first and the last included."""
        prompt = await self._prompt(spoken.messages)
        last = len(spoken.likely) - 1
        assert last >= 0
        assert len(spoken.text) == len(spoken.likely), "a letter is a token"
        places = sorted({round(n * last / (positions - 1)) for n in range(positions)})
        return max([await self._deviation_at(prompt, spoken, place) for place in places])

    async def _deviation_at(self, prompt: str, spoken: Spoken, place: int) -> float:
        alone = await self._next(prompt + spoken.text[:place])
        told = spoken.likely[place]
        return sum(math.exp(told[token]) * abs(alone.get(token, NEVER) - told[token]) for token in told)

    async def surprise(self, spoken: Spoken) -> float:
        """How unlikely the least likely letter of the text was against the likeliest one in its place."""
        prompt = await self._prompt(spoken.messages)
        return max([await self._surprise_at(prompt, spoken.text, place) for place in range(len(spoken.text))])

    async def _surprise_at(self, prompt: str, text: str, place: int) -> float:
        said = await self._ask(prompt + text[:place])
        chances = {entry["token"]: entry["logprob"] for entry in reversed(said)}
        return float(said[0]["logprob"] - chances.get(text[place], float("-inf")))

    async def _prompt(self, messages: list[Message]) -> str:
        return str((await self._server.post_json("/apply-template", {"messages": messages}))["prompt"])

    async def _next(self, prompt: str) -> LogProbs:
        return {entry["id"]: entry["logprob"] for entry in await self._ask(prompt)}

    async def _ask(self, prompt: str) -> list[dict[str, Any]]:
        body = {"prompt": prompt, "n_predict": 1, "n_probs": 20, "temperature": 0, "cache_prompt": True}
        answer = await self._server.post_json("/completion", body)
        likely: list[dict[str, Any]] = answer["completion_probabilities"][0]["top_logprobs"]
        return likely
