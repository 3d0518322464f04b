"""Was a request really served from what it was said to find? Decides by what each answer left behind.

A session that was said to be `resident` or `restored` must reuse nearly all that its prompt shares with what
was there; `prefix-diverged` explains the rest. What was there is known from outside: the tokens of a prompt
and of its answer, as one server left them in one of its lives.

Memory that cannot roll back (`rolls_back` False) reuses all of what is stored or nothing, and may have been
brought back to where the reply began. What its prompt does not extend must not be restored.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from tests.fakes.tokens import common_prefix

TOLERANCE = 4
"""Tokens. The last one of an answer is never in the slot, and the last one of a prompt is always computed."""


@dataclass(frozen=True, slots=True)
class Left:
    """What an answer left: the tokens of prompt and answer, the prompt's in front. `life` is the server's."""

    ids: list[int]
    prompt: int
    life: int
    is_open: bool = False
    """It was broken off, and more may have been said."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What was said of a request, and what it reused."""

    prompt: list[int]
    outcome: str
    restored_tokens: int
    reused: int


@dataclass(slots=True)
class Oracle:
    """`life` is the server's present one. What `who` was left with is told apart by anything hashable: a
    session under one identity of the server."""

    life: int = 0
    _left: dict[Hashable, list[Left]] = field(default_factory=dict)

    def heard(self, who: Hashable, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """`who` was answered. The last token was said and never computed."""
        left = Left([*prompt, *answer[:-1]], len(prompt), self.life)
        self._left.setdefault(who, []).append(left)

    def dropped(self, who: Hashable, prompt: Sequence[int]) -> None:
        """`who` left in the middle of an answer."""
        self._left.setdefault(who, []).append(Left([*prompt], len(prompt), self.life, is_open=True))

    def objection(self, who: Hashable, claim: Claim, *, rolls_back: bool = True) -> str | None:
        """Why `claim` is false; None if nothing speaks against it."""
        before = self._left.get(who, [])
        if claim.outcome == "resident":
            return self._resident(before, claim, rolls_back)
        if claim.outcome == "restored":
            return self._restored(before, claim, rolls_back)
        return f"{claim.restored_tokens} tokens restored" if claim.restored_tokens else None

    def _resident(self, before: list[Left], claim: Claim, rolls_back: bool) -> str | None:
        if not before or before[-1].life != self.life:
            return "nothing of it is in this life of the server"
        stored = before[-1]
        shared = common_prefix(stored.ids, claim.prompt)
        if rolls_back:
            return _too_little(claim, shared)
        return _too_little(claim, stored.prompt) if shared == len(stored.ids) else None

    def _restored(self, before: list[Left], claim: Claim, rolls_back: bool) -> str | None:
        count = claim.restored_tokens
        whole = [left.ids for left in before if len(left.ids) == count]
        cut = [left.ids[:count] for left in before if left.prompt - TOLERANCE <= count < len(left.ids)]
        broken = [left.ids for left in before if left.is_open and len(left.ids) < count]
        stored = whole + broken if rolls_back else whole + broken + cut
        if not stored:
            return f"no answer had left {count} tokens"
        shared = max(common_prefix(ids, claim.prompt) for ids in stored)
        if not rolls_back and shared < count:
            return f"the prompt leaves the snapshot of {count} tokens after {shared}"
        return _too_little(claim, shared)


def _too_little(claim: Claim, shared: int) -> str | None:
    least = min(shared, len(claim.prompt) - 1) - TOLERANCE
    return None if claim.reused >= least else f"{claim.reused} tokens reused of {shared} shared"
