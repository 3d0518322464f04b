"""What a model thinks comes next, and how far two such opinions are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.real import LlamaServer

TOP = 20
LISTED = 200
"""So many are asked for, that the likeliest of one opinion are all found in the other."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """`reused` tokens of the prompt were not computed; `logprobs` are those of the likeliest next tokens."""

    reused: int
    logprobs: dict[int, float]

    def distance(self, other: Opinion) -> float:
        """The Kullback-Leibler divergence of `other` from this one, over this one's likeliest tokens."""
        likeliest = sorted(self.logprobs, key=self.logprobs.__getitem__, reverse=True)[:TOP]
        least = min(other.logprobs.values())
        return sum(
            math.exp(self.logprobs[one]) * (self.logprobs[one] - other.logprobs.get(one, least))
            for one in likeliest
        )


async def put(server: LlamaServer, ids: Sequence[int], slot: int = 0) -> int:
    """Have the prompt computed into the slot, and nothing more; the tokens reused."""
    body = {"prompt": list(ids), "n_predict": 0, "id_slot": slot, "cache_prompt": True}
    timings = (await server.post_json("/completion", body))["timings"]
    reused: int = timings["cache_n"]
    return reused


async def opinion(server: LlamaServer, ids: Sequence[int], slot: int = 0) -> Opinion:
    body = {"prompt": list(ids), "n_predict": 1, "id_slot": slot, "cache_prompt": True, "n_probs": LISTED}
    answer = await server.post_json("/completion", body | {"temperature": 0})
    listed = answer["completion_probabilities"][0]["top_logprobs"]
    return Opinion(answer["timings"]["cache_n"], {one["id"]: one["logprob"] for one in listed})


async def erase(server: LlamaServer, slot: int = 0) -> None:
    await server.post_json(f"/slots/{slot}?action=erase")


async def save(server: LlamaServer, name: str, slot: int = 0) -> int:
    """The tokens saved."""
    saved: int = (await server.post_json(f"/slots/{slot}?action=save", {"filename": name}))["n_saved"]
    return saved


async def restore(server: LlamaServer, name: str, slot: int = 0) -> int:
    """The tokens restored."""
    answer = await server.post_json(f"/slots/{slot}?action=restore", {"filename": name})
    restored: int = answer["n_restored"]
    return restored
