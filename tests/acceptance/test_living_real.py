"""kvproxy killed in front of a real llama-server that lives on."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.acceptance.conftest import SetStage, Stage

pytestmark = pytest.mark.real

FLAGS = ("-c", "8192", "-np", "2", "--cache-ram", "0")
TEXTS = {name: f"{name} walks through many words " * 30 for name in ("ann", "ben")}


async def ask(stage: Stage, session: str, prompt: str) -> tuple[str | None, int]:
    """What it was believed to find, and how many tokens it reused."""
    body = {"prompt": prompt, "n_predict": 4, "temperature": 0}
    async with (
        aiohttp.ClientSession(stage.url) as client,
        client.post("/completion", json=body, headers={"X-Session-Id": session}) as response,
    ):
        assert response.status == 200, await response.text()
        timings = (await response.json())["timings"]
        return response.headers.get("X-KVProxy-Outcome"), timings["cache_n"]


async def talked(stage: Stage) -> None:
    """Both have spoken, and it was written down."""
    for name, text in TEXTS.items():
        await ask(stage, name, text)
    record = stage.state_dir / "living-main.json"
    async with asyncio.timeout(10):
        while not record.exists() or record.read_text().count('"task"') < len(TEXTS):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_both_conversations_go_on_without_a_slot_action(set_stage: SetStage) -> None:
    stage = await set_stage(*FLAGS)
    await talked(stage)
    await stage.kvproxy.kill()
    await stage.kvproxy.start()
    stage.tap.forget()
    for name, text in TEXTS.items():
        outcome, reused = await ask(stage, name, text + "and more")
        assert outcome == "resident"
        assert reused >= len(text) - 2
    assert stage.tap.slot_actions() == []


async def test_a_slot_that_a_stranger_used_meanwhile_is_not_believed(set_stage: SetStage) -> None:
    stage = await set_stage(*FLAGS)
    await talked(stage)
    await stage.kvproxy.kill()
    for slot in (0, 1):
        await stage.llama.post_json("/completion", {"prompt": "a stranger", "n_predict": 1, "id_slot": slot})
    await stage.kvproxy.start()
    for name, text in TEXTS.items():
        outcome, _ = await ask(stage, name, text + "and more")
        assert outcome != "resident"
