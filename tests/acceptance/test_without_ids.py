"""Conversations whose clients send no id at all, as most do: known by what they say, through any restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.acceptance.conftest import Measured, SetStage
from tests.acceptance.six import A_MOMENT, CONTEXT, LAST, SESSIONS, TURNS, ceiling_of, later_share
from tests.support.load import Conversation, run_load, words

pytestmark = pytest.mark.real

TOLERANCE = 0.006
FLAGS = ("-c", str(CONTEXT * 2), "-np", "2", "--cache-ram", "0")


def unnamed(*, shares_system: bool, pins: bool = False) -> list[Conversation]:
    found = []
    for n in range(SESSIONS):
        read = f"Read this and answer. {words('shared' if shares_system else n, 500)}"
        extra = {"id_slot": n} if pins else {}
        system = {"role": "system", "content": read}
        found.append(Conversation(f"session {n}", [system], extra=extra, has_id=False))
    return found


@pytest.fixture(scope="module")
def ceiling(tiny_llama: Path) -> float:
    return asyncio.run(ceiling_of(tiny_llama, pinned=unnamed(shares_system=False, pins=True)))


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("shares_system", [False, True])
async def test_what_is_reused_without_ids_is_all_there_is_to_reuse(
    set_stage: SetStage, measured: Measured, ceiling: float, shares_system: bool, concurrency: int
) -> None:
    """Both kvproxy and, after it, the server end between turns; nobody is taken for somebody else."""
    stage = await set_stage(*FLAGS)

    async def restart(turn: int) -> None:
        if turn == 1:
            assert await stage.kvproxy.stop() == 0
            await stage.kvproxy.start()
        if turn == LAST:
            await asyncio.sleep(A_MOMENT)
            await stage.llama.restart()

    talks = unnamed(shares_system=shares_system)
    answers = await run_load(stage.url, talks, turns=TURNS, concurrency=concurrency, before_turn=restart)

    share = later_share(answers)
    measured(f"reuse share {share:.4f} of {ceiling:.4f} without ids, {concurrency=}, {shares_system=}")
    assert share >= ceiling - TOLERANCE
    sessions = [{turn[n].headers["x-kvproxy-session"] for turn in answers} for n in range(SESSIONS)]
    assert all(len(own) == 1 for own in sessions)
    assert len(set.union(*sessions)) == SESSIONS
