"""A sliding window without `--swa-full`: nothing is saved or restored, and the flag is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import models
from scripts.tiny_models import Kind
from tests.acceptance.conftest import Measured
from tests.support.daemon import Kvproxy
from tests.support.load import Conversation, client
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

FLAGS = ("-c", "65536", "-np", "2", "--cache-ram", "0")
TURNS = 3


async def reused_in(base_url: str, names: tuple[str, ...]) -> int:
    talks = [Conversation.about(name) for name in names]
    async with client(base_url) as session:
        answers = [await talk.turn(session) for _ in range(TURNS) for talk in talks]
    return sum(answer.reused for answer in answers)


async def test_a_sliding_window_is_left_alone_and_keeps_its_slots(tmp_path: Path, measured: Measured) -> None:
    model, slots = models.tiny(Kind.GEMMA3), tmp_path / "slots"
    slots.mkdir()
    async with LlamaServer(model, *FLAGS, slot_dir=slots) as server:
        direct = await reused_in(server.base_url, ("a", "b"))
    async with (
        LlamaServer(model, *FLAGS, slot_dir=slots) as server,
        Kvproxy(server.base_url, tmp_path / "state", snapshot_dir=slots) as kvproxy,
    ):
        through = await reused_in(kvproxy.base_url, ("a", "b"))
        await kvproxy.flush()
        status = await kvproxy.status()
    (shown,) = status["servers"]
    measured(f"tiny-gemma3 without --swa-full: {through} tokens reused, {direct} directly")
    assert shown["persistence"]["mode"] == "off"
    assert "--swa-full" in shown["persistence"]["reason"]
    assert (status["stats"]["saves"], status["stats"]["restores"]) == (0, 0)
    assert list(slots.iterdir()) == []
    assert through >= 0.98 * direct
