"""How much of its prompts a busy group of conversations gets back, whatever dies in between. The
ceiling is measured in the same run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.conftest import Measured, SetStage, Stage
from tests.acceptance.six import A_MOMENT, LAST, TURNS, ceiling_of, conversations, flags, later_share
from tests.support.load import BeforeTurn, run_load

Judge = Callable[[str, float], None]

pytestmark = pytest.mark.real

TOLERANCE = 0.006
ON_IDLE = ("checkpoint.on_idle_seconds=1",)


@pytest.fixture(scope="module")
def ceiling(tiny_llama: Path) -> float:
    return asyncio.run(ceiling_of(tiny_llama))


async def share_of(stage: Stage, before_turn: BeforeTurn, concurrency: int = 1) -> float:
    answers = await run_load(
        stage.url, conversations(), turns=TURNS, concurrency=concurrency, before_turn=before_turn
    )
    return later_share(answers)


@pytest.fixture
def judge(ceiling: float, measured: Measured) -> Judge:
    """Write down a share, and fail if it is below the ceiling."""

    def check(name: str, share: float) -> None:
        measured(f"reuse share {share:.4f} of a ceiling of {ceiling:.4f}: {name}")
        assert share >= ceiling - TOLERANCE

    return check


@pytest.mark.parametrize(("slots", "concurrency"), [(1, 1), (2, 1), (2, 4)])
async def test_a_server_killed_before_the_last_turn_costs_nothing(
    set_stage: SetStage, judge: Judge, slots: int, concurrency: int
) -> None:
    stage = await set_stage(*flags(slots))

    async def kill_server(turn: int) -> None:
        if turn == LAST:
            await asyncio.sleep(A_MOMENT)
            await stage.llama.restart()

    share = await share_of(stage, kill_server, concurrency)
    judge(f"server killed, {slots} slots, concurrency {concurrency}", share)


async def test_kvproxy_killed_between_turns_after_its_idle_checkpoint_costs_nothing(
    set_stage: SetStage, judge: Judge
) -> None:
    stage = await set_stage(*flags(2), settings=ON_IDLE)

    async def kill_kvproxy(turn: int) -> None:
        if turn > 0:
            await stage.kvproxy.until_saved()
            await stage.kvproxy.kill()
            await stage.kvproxy.start()

    share = await share_of(stage, kill_kvproxy)
    judge("kvproxy killed", share)


async def test_kvproxy_stopped_at_once_between_turns_costs_nothing(set_stage: SetStage, judge: Judge) -> None:
    stage = await set_stage(*flags(2))

    async def stop_kvproxy(turn: int) -> None:
        if turn > 0:
            assert await stage.kvproxy.stop() == 0
            await stage.kvproxy.start()

    share = await share_of(stage, stop_kvproxy)
    judge("kvproxy stopped", share)


@pytest.mark.parametrize("is_killed", [True, False])
async def test_both_down_between_turns_costs_nothing(
    set_stage: SetStage, judge: Judge, is_killed: bool
) -> None:
    stage = await set_stage(*flags(2), settings=ON_IDLE)

    async def take_both_down(turn: int) -> None:
        if turn == 0:
            return
        if is_killed:
            await stage.kvproxy.until_saved()
            await stage.kvproxy.kill()
        else:
            assert await stage.kvproxy.stop() == 0
        await stage.llama.restart()
        await stage.kvproxy.start()

    share = await share_of(stage, take_both_down)
    judge(f"both down, kvproxy {'killed' if is_killed else 'stopped'}", share)
