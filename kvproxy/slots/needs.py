"""How many tokens a request may come to put into a slot, reckoned before anybody has tokenised it.

Too high costs a wait, too low the answers of all that run. So a conversation's known prompt counts as it was
counted, what is new at the densest that answers have shown (a token per byte until one has), and the answer
at the limit the client stated. Where it stated none, at the longest of those that had none, and at twice what
was reckoned in all where the server ran out of room all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.frozen import frozen

LEAST_ANSWER_TOKENS = 1024
"""What an answer without a limit is given before any is known."""

TEMPLATE_TOKENS = 64
"""What a chat template adds of its own, whatever the length of the messages."""

TELLING_BYTES = 1024
"""Shorter requests are mostly template, and say nothing of how dense text is."""


@frozen
class Measure:
    """A request that was answered: the bytes of its body, and the tokens of its prompt."""

    body_bytes: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Need:
    """Tokens that a request is `thought` to put into a slot, and how many it may be `at_worst`."""

    thought: int = 0
    at_worst: int = 0


NOTHING = Need()


class Needs:
    """What the answers of one server have taught. Counts are tokens."""

    def __init__(self) -> None:
        self._tokens_per_byte = 1.0
        self._is_taught = False
        self._answer = LEAST_ANSWER_TOKENS
        self.shortfalls = 0
        """How many times the server ran out of room."""

    def of(self, body_bytes: int, limit: int | None, known: Measure | None, pool: int | None) -> Need:
        """For a request with a body of `body_bytes`, whose answer the client limited to `limit` tokens.

        `known` is the newest measure of its conversation. Never more than `pool`, which the slots share;
        nothing where they share nothing, and nobody asks.
        """
        if pool is None:
            return NOTHING
        thought = min(pool, self._prompt(body_bytes, known) + (self._answer if limit is None else limit))
        return Need(thought, pool if limit is None else thought)

    def learn(self, measure: Measure, generated: int | None, limit: int | None) -> None:
        """From an answer that has ended."""
        if measure.body_bytes >= TELLING_BYTES:
            density = min(1.0, measure.prompt_tokens / measure.body_bytes)
            self._tokens_per_byte = max(self._tokens_per_byte, density) if self._is_taught else density
            self._is_taught = True
        if limit is None:
            self._answer = max(self._answer, generated or 0)

    def fell_short(self, given: int) -> None:
        """The server ran out of room under a request that was thought to need `given` at most."""
        self.shortfalls += 1
        self._answer = max(self._answer, 2 * given)

    def _prompt(self, body_bytes: int, known: Measure | None) -> int:
        if known is None or body_bytes < known.body_bytes:
            return TEMPLATE_TOKENS + int(body_bytes * self._tokens_per_byte)
        return known.prompt_tokens + int((body_bytes - known.body_bytes) * self._tokens_per_byte)


def answer_limit(document: object) -> int | None:
    """The most tokens that the client of a request asks for; None if it says nothing, or no number."""
    if not isinstance(document, dict):
        return None
    largest = None
    for field in _LIMITS:
        if field not in document:
            continue
        stated = document[field]
        if isinstance(stated, int) and not isinstance(stated, bool) and stated >= (largest or 0):
            largest = stated
    return largest


_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
"""Where several stand, which of them counts differs by endpoint: the largest is safe."""
