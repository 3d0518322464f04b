"""What a model finds likely (n_probs): the same for the same weights and prompt only. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.fakes.tokens import BYTE_OFFSET

LETTERS = range(ord("a"), ord("z") + 1)


@dataclass(frozen=True, slots=True)
class Probabilities:
    weights: str = ""
    prompt: Sequence[int] = ()
    count: int = 0
    """tokens listed at each step; 0 lists none"""

    def of(self, text: bytes) -> list[dict[str, Any]]:
        """One entry for each token of an answer, in which every byte is a token."""
        return [self._entry(text, step) for step in range(len(text))] if self.count > 0 else []

    def _entry(self, text: bytes, step: int) -> dict[str, Any]:
        chance = random.Random(f"{self.weights} {list(self.prompt)} {step}")
        weights = {byte: math.exp(3 * chance.random()) for byte in LETTERS}
        total = sum(weights.values())
        likeliest = sorted(weights, key=lambda byte: weights[byte], reverse=True)[: self.count]
        listed = [_token(byte, math.log(weights[byte] / total)) for byte in likeliest]
        said = text[step]
        return {**_token(said, math.log(weights.get(said, 1.0) / total)), "top_logprobs": listed}


def _token(byte: int, logprob: float) -> dict[str, Any]:
    text = bytes([byte]).decode("utf-8", "replace")
    return {"id": byte + BYTE_OFFSET, "token": text, "bytes": [byte], "logprob": logprob}
