"""Six conversations of about 3,000 tokens, and what they reuse where nothing gets in their way.

The ceiling is what they reuse in as many slots as conversations, each in its own, while nothing dies. What is
missing there is the new text of each turn, which somebody has to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.load import Answer, Conversation, reuse_share, run_load
from tests.support.real import LlamaServer

SESSIONS = 6
TURNS = 3
LAST = TURNS - 1
WORDS = 500
CONTEXT = 6144
A_MOMENT = 0.2
"""Seconds between the last answer and the kill. In the very milliseconds after it nothing can be saved yet,
and every slot's last turn is lost; a moment later only that of the slot which was used last."""


def conversations(*, are_pinned: bool = False) -> list[Conversation]:
    pins = [{"id_slot": n} if are_pinned else {} for n in range(SESSIONS)]
    return [Conversation.about(f"session {n}", WORDS, extra=pin) for n, pin in enumerate(pins)]


def flags(slots: int) -> tuple[str, ...]:
    return ("-c", str(CONTEXT * slots), "-np", str(slots), "--cache-ram", "0")


def later_share(answers: list[list[Answer]]) -> float:
    """What the turns after the first reused."""
    assert {answer.status for turn in answers for answer in turn} == {200}
    return reuse_share(answer for turn in answers[1:] for answer in turn)


async def ceiling_of(model: Path, *more: str, pinned: Sequence[Conversation] | None = None) -> float:
    """`more` are flags of the server. `pinned` are others than `conversations(are_pinned=True)`."""
    talks = conversations(are_pinned=True) if pinned is None else list(pinned)
    async with LlamaServer(model, *flags(SESSIONS), *more) as server:
        return later_share(await run_load(server.base_url, talks, turns=TURNS))
