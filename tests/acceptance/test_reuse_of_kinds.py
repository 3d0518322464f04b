"""The load of `test_reuse` on models whose memory is not full attention, against a ceiling of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from scripts import models
from scripts.tiny_models import Kind
from tests.acceptance.conftest import Measured, SetStage
from tests.acceptance.six import (
    A_MOMENT,
    CONTEXT,
    LAST,
    SESSIONS,
    TURNS,
    ceiling_of,
    conversations,
    flags,
    later_share,
)
from tests.support.load import run_load
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

TOLERANCE = 0.015
WINDOW_TOLERANCE = 0.02
SWA_FULL = "--swa-full"


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize(("kind", "more"), [(Kind.LFM2, ()), (Kind.MAMBA, ()), (Kind.GEMMA3, (SWA_FULL,))])
async def test_a_server_killed_before_the_last_turn_costs_nearly_nothing(
    set_stage: SetStage, measured: Measured, kind: Kind, more: tuple[str, ...], concurrency: int
) -> None:
    ceiling = await ceiling_of(models.tiny(kind), *more)
    stage = await set_stage(*flags(2), *more, model=models.tiny(kind))

    async def kill_server(turn: int) -> None:
        if turn == LAST:
            await asyncio.sleep(A_MOMENT)
            await stage.llama.restart()

    answers = await run_load(
        stage.url, conversations(), turns=TURNS, concurrency=concurrency, before_turn=kill_server
    )
    share = later_share(answers)
    measured(f"tiny-{kind} {' '.join(more)}, concurrency {concurrency}: reuse {share:.4f} of {ceiling:.4f}")
    assert share >= ceiling - TOLERANCE


@pytest.mark.parametrize(
    "more",
    [("-np", "2"), ("-np", "2", "--cache-ram", "0"), ("-np", str(SESSIONS), "--cache-ram", "0")],
    ids=" ".join,
)
async def test_a_sliding_window_that_is_not_to_be_opened_costs_nothing_and_moves_nothing(
    set_stage: SetStage, tiny_gemma3: Path, tmp_path: Path, measured: Measured, more: tuple[str, ...]
) -> None:
    command = ("-c", str(CONTEXT * SESSIONS), *more)
    async with LlamaServer(tiny_gemma3, *command, slot_dir=tmp_path) as server:
        plain = later_share(await run_load(server.base_url, conversations(), turns=TURNS))
    stage = await set_stage(*command, model=tiny_gemma3, settings=("restore.window_edit=off",))
    share = later_share(await run_load(stage.url, conversations(), turns=TURNS))
    await stage.kvproxy.flush()
    moved = [action for action, _ in stage.tap.slot_actions() if action in ("save", "restore")]
    measured(f"tiny-gemma3 {' '.join(more)}: reuse {share:.4f}, without kvproxy {plain:.4f}")
    assert moved == []
    assert share >= plain - WINDOW_TOLERANCE
