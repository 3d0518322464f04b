"""Conversations whose clients send no id at all, as most do: known by what they say, through any restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.acceptance.conftest import Measured, SetStage
from tests.support.load import Answer, Conversation, reuse_share, run_load, words
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

SESSIONS = 6
TURNS = 3
LAST = TURNS - 1
CONTEXT = 6144
TOLERANCE = 0.006
A_MOMENT = 0.2
"""As in `test_reuse`."""
FLAGS = ("-c", str(CONTEXT * 2), "-np", "2", "--cache-ram", "0")


def conversations(*, shares_system: bool, pins: bool = False) -> list[Conversation]:
    found = []
    for n in range(SESSIONS):
        read = f"Read this and answer. {words('shared' if shares_system else n, 500)}"
        extra = {"id_slot": n} if pins else {}
        system = {"role": "system", "content": read}
        found.append(Conversation(f"session {n}", [system], extra=extra, has_id=False))
    return found


def later_share(answers: list[list[Answer]]) -> float:
    assert {answer.status for turn in answers for answer in turn} == {200}
    return reuse_share(answer for turn in answers[1:] for answer in turn)


@pytest.fixture(scope="module")
def ceiling(tiny_llama: Path) -> float:
    return asyncio.run(_share_on_private_slots(tiny_llama))


async def _share_on_private_slots(model: Path) -> float:
    flags = ("-c", str(CONTEXT * SESSIONS), "-np", str(SESSIONS), "--cache-ram", "0")
    async with LlamaServer(model, *flags) as server:
        talks = conversations(shares_system=False, pins=True)
        return later_share(await run_load(server.base_url, talks, turns=TURNS))


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

    talks = conversations(shares_system=shares_system)
    answers = await run_load(stage.url, talks, turns=TURNS, concurrency=concurrency, before_turn=restart)

    share = later_share(answers)
    measured(f"reuse share {share:.4f} of {ceiling:.4f} without ids, {concurrency=}, {shares_system=}")
    assert share >= ceiling - TOLERANCE
    sessions = [{turn[n].headers["x-kvproxy-session"] for turn in answers} for n in range(SESSIONS)]
    assert all(len(own) == 1 for own in sessions)
    assert len(set.union(*sessions)) == SESSIONS
