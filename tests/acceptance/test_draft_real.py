"""A real llama-server with a draft model: tiny-llama as its own."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.acceptance.conftest import SetStage, Stage

pytestmark = pytest.mark.real

LONG, SHORT = "alpha " * 60, "beta " * 20


def draft_flags(model: Path) -> tuple[str, ...]:
    return ("-c", "4096", "-np", "1", "--cache-ram", "0", "-md", str(model), "--spec-type", "draft-simple")


async def ask(stage: Stage, session: str, prompt: str) -> tuple[int, str | None, dict[str, int]]:
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "cache_prompt": True}
    async with (
        aiohttp.ClientSession(stage.url) as client,
        client.post("/completion", json=body, headers={"X-Session-Id": session}) as response,
    ):
        answer = await response.json()
        return response.status, response.headers.get("X-KVProxy-Outcome"), answer.get("timings", {})


async def test_the_server_fails_where_a_snapshot_is_restored_over_another_text(
    tiny_llama: Path, set_stage: SetStage
) -> None:
    """What the rules below are for."""
    stage = await set_stage(*draft_flags(tiny_llama))
    server = stage.llama
    for prompt, action in ((LONG, "save"), (SHORT, "restore")):
        await server.post_json("/completion", {"prompt": prompt, "id_slot": 0, "n_predict": 16})
        await server.post_json(f"/slots/0?action={action}", {"filename": "a"})
    async with aiohttp.ClientSession(server.base_url) as client:
        body = {"prompt": LONG + "more", "id_slot": 0, "n_predict": 16}
        async with client.post("/completion", json=body) as response:
            assert response.status == 500
            assert "failed to process speculative batch" in await response.text()


async def test_conversations_come_back_through_a_switch_and_a_restart(
    tiny_llama: Path, set_stage: SetStage
) -> None:
    stage = await set_stage(*draft_flags(tiny_llama), settings=("checkpoint.min_tokens=0",))
    assert (await ask(stage, "a", LONG))[0] == 200
    assert (await ask(stage, "b", SHORT))[0] == 200
    status, outcome, timings = await ask(stage, "a", LONG + "and more")
    assert (status, outcome) == (200, "restored")
    assert timings["cache_n"] >= len(LONG) - 2
    assert (await ask(stage, "b", SHORT + "more"))[:2] == (200, "restored")
    await stage.llama.restart()
    status, outcome, timings = await ask(stage, "a", LONG + "and more of it")
    assert (status, outcome) == (200, "restored")
    assert timings["cache_n"] >= len(LONG) - 2


async def test_a_slot_whose_draft_lost_track_serves_all_the_same(
    tiny_llama: Path, set_stage: SetStage
) -> None:
    stage = await set_stage(*draft_flags(tiny_llama), settings=("checkpoint.min_tokens=0",))
    assert (await ask(stage, "a", LONG))[0] == 200
    # Behind kvproxy's back, as an operator's script would.
    await stage.llama.post_json("/slots/0?action=save", {"filename": "a"})
    await stage.llama.post_json("/slots/0?action=erase", {})
    await stage.llama.post_json("/completion", {"prompt": SHORT, "id_slot": 0, "n_predict": 4})
    await stage.llama.post_json("/slots/0?action=restore", {"filename": "a"})
    status, _, timings = await ask(stage, "a", LONG + "and more")
    assert status == 200
    assert timings["cache_n"] == 0
