"""A server started without `-np` clears idle slots: the flag is named, and nothing made worse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.conftest import Measured, SetStage
from tests.support.load import Conversation, client, reuse_share, run_load
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

DEFAULTS = ("-c", "16384")
TOLERANCE = 0.02
"""What the server keeps of three conversations is its own choice, and not always the same."""


def trio() -> list[Conversation]:
    return [Conversation.about(f"speaker {n}", 200) for n in range(3)]


async def test_default_flags_are_found_out_and_named(set_stage: SetStage) -> None:
    stage = await set_stage(*DEFAULTS)
    async with client(stage.url) as session:
        for _ in range(2):
            for one in trio():
                assert (await one.turn(session)).status == 200
    (server,) = (await stage.kvproxy.status())["servers"]
    assert server["volatile_slots"] is True
    assert server["persistence"]["mode"] == "plain"
    assert "-np" in server["reason"]
    assert len(stage.kvproxy.events("kv.backend.volatile")) == 1


async def test_default_flags_are_not_made_worse(
    set_stage: SetStage, tiny_llama: Path, tmp_path: Path, measured: Measured
) -> None:
    async with LlamaServer(tiny_llama, *DEFAULTS, slot_dir=tmp_path) as server:
        direct = await run_load(server.base_url, trio(), turns=4)
    stage = await set_stage(*DEFAULTS)
    proxied = await run_load(stage.url, trio(), turns=4)
    assert {answer.status for turn in proxied for answer in turn} == {200}
    theirs = reuse_share(answer for turn in direct[1:] for answer in turn)
    ours = reuse_share(answer for turn in proxied[1:] for answer in turn)
    measured(f"default flags: reuse share {ours:.4f}, directly {theirs:.4f}")
    assert ours >= theirs - TOLERANCE
