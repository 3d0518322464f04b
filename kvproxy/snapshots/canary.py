"""What a model says to a fixed short prompt: tells apart what the server does not tell of itself.

The probabilities are those of the model itself, before any sampler, so they change with whatever changes
the KV of the same tokens: the weights, adapters, the rotary encoding, the KV type, flash attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TOLERANCE = 1e-4
"""Of a natural logarithm. A server with nothing else to do answers to the last bit in every life, whatever
its threads, batches, slots and context; beside busy slots 3e-6 was seen, or far more with unified KV, which
is why it is asked while they are idle. The smallest change that mattered was 8e-4: flash attention on tiny
random weights, while SmolLM2-135M shows 0.1 for it."""

_FLOOR = -80.0
"""Below it single precision runs out of digits; llama-server says -3.4e38 for a probability of 0."""
_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class Canary:
    """The likeliest next tokens, likeliest first: id and natural logarithm of the probability."""

    logprobs: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logprobs: Iterable[tuple[int, float]]) -> Canary:
        """In order and rounded, so that a stored one equals a fresh one. ValueError if there are none, or
        if one is not a number."""
        kept = [(token, round(max(logprob, _FLOOR), _DECIMALS)) for token, logprob in logprobs]
        if not kept or not all(math.isfinite(logprob) for _, logprob in kept):
            raise ValueError("no log-probabilities")
        return cls(tuple(sorted(kept, key=lambda pair: (-pair[1], pair[0]))))

    @classmethod
    def from_dict(cls, logprobs: Mapping[str, float]) -> Canary:
        """From the form kept in JSON. ValueError or TypeError if it is something else."""
        return cls.of((int(token), float(logprob)) for token, logprob in logprobs.items())

    def as_dict(self) -> dict[str, float]:
        return {str(token): logprob for token, logprob in self.logprobs}

    def difference(self, other: Canary) -> float:
        """The largest of any token. One that only one side lists counts by how much likelier it is than
        the least likely that the other lists: it differs by at least that."""
        mine, theirs = dict(self.logprobs), dict(other.logprobs)
        shared = (abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys())
        return max(0.0, *shared, _excess(mine, theirs), _excess(theirs, mine))

    def matches(self, other: Canary, tolerance: float = TOLERANCE) -> bool:
        return self.difference(other) <= tolerance


def _excess(listed: Mapping[int, float], elsewhere: Mapping[int, float]) -> float:
    least = min(elsewhere.values())
    return max((listed[token] - least for token in listed.keys() - elsewhere.keys()), default=0.0)
