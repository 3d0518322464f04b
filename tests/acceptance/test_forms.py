"""Snapshots of memory that cannot roll back, through kvproxy and a restart, against a private slot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import models
from scripts.tiny_models import Kind
from tests.acceptance.conftest import Measured
from tests.acceptance.test_boundary_real import CLIENTS, FLAGS, LEAST_SHARE, Turn, private_reuse, rewriting
from tests.support.daemon import Kvproxy
from tests.support.load import ask, client
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

SESSION = {"X-Session-Id": "one"}


async def through_kvproxy(
    model: Path, flags: Sequence[str], turns: Sequence[Turn], folder: Path
) -> tuple[int, str]:
    """Tokens reused at the last turn, after a restart of the server, and the outcome it was told."""
    slots = folder / "slots"
    slots.mkdir()
    async with (
        LlamaServer(model, *FLAGS, *flags, slot_dir=slots) as server,
        Kvproxy(server.base_url, folder / "state", snapshot_dir=slots) as kvproxy,
    ):
        async with client(kvproxy.base_url) as session:
            for turn in turns[:-1]:
                await ask(session, turn.body(), SESSION)
            await kvproxy.flush()
            await server.restart()
            answer = await ask(session, turns[-1].body(), SESSION)
        return answer.reused, answer.outcome


@pytest.mark.parametrize("client_kind", CLIENTS)
@pytest.mark.parametrize("kind", [Kind.MAMBA, Kind.LFM2])
async def test_a_client_that_rewrites_its_last_turn_reuses_what_a_private_slot_gives(
    kind: Kind, client_kind: str, tmp_path: Path, measured: Measured
) -> None:
    turns = CLIENTS[client_kind]
    private = await private_reuse(models.tiny(kind), (), turns)
    reused, outcome = await through_kvproxy(models.tiny(kind), (), turns, tmp_path)
    measured(f"tiny-{kind} through kvproxy, {client_kind}: {reused} reused, {private} in a private slot")
    assert outcome == "restored"
    assert reused >= LEAST_SHARE * private


async def test_a_sliding_window_kept_in_full_goes_on_after_a_restart(tmp_path: Path) -> None:
    private = await private_reuse(models.tiny(Kind.GEMMA3), ("--swa-full",), rewriting())
    reused, outcome = await through_kvproxy(models.tiny(Kind.GEMMA3), ("--swa-full",), rewriting(), tmp_path)
    assert outcome == "restored"
    assert reused >= LEAST_SHARE * private


async def test_a_rollback_of_a_restored_sliding_window_is_cold(tmp_path: Path) -> None:
    turns = rewriting()
    shorter = Turn(turns[-1].messages[:-3], None)
    reused, outcome = await through_kvproxy(
        models.tiny(Kind.GEMMA3), ("--swa-full",), [*turns[:-1], shorter], tmp_path
    )
    assert (outcome, reused) == ("cold", 0)
