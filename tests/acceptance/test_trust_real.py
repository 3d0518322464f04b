"""Restores that help nobody, on models whose memory is the reason: given up, with the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.daemon import Kvproxy
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

FLAGS = ("-c", "2048", "-np", "1", "--cache-ram", "0")
TEXTS = {name: f"{name} walks through many words " * 20 for name in ("ann", "ben", "cid")}


@asynccontextmanager
async def stage(model: Path, tmp_path: Path, *flags: str) -> AsyncIterator[tuple[LlamaServer, Kvproxy]]:
    slots = tmp_path / "slots"
    slots.mkdir()
    async with LlamaServer(model, *FLAGS, *flags, slot_dir=slots) as server:
        settings = ("checkpoint.min_tokens=0", "restore.window_edit=off")
        async with Kvproxy(server.base_url, tmp_path / "state", *settings, snapshot_dir=slots) as kvproxy:
            yield server, kvproxy


async def ask(kvproxy: Kvproxy, session: str, prompt: str) -> str:
    """What it was believed to find."""
    body = {"prompt": prompt, "n_predict": 4, "temperature": 0}
    async with (
        aiohttp.ClientSession(kvproxy.base_url) as client,
        client.post("/completion", json=body, headers={"X-Session-Id": session}) as response,
    ):
        assert response.status == 200, await response.text()
        return response.headers["X-KVProxy-Outcome"]


async def persistence(kvproxy: Kvproxy) -> dict[str, Any]:
    async with aiohttp.ClientSession(kvproxy.base_url) as client, client.get("/kvproxy/status") as response:
        server: dict[str, Any] = (await response.json())["servers"][0]
        told: dict[str, Any] = server["persistence"]
        return told


async def outcomes(kvproxy: Kvproxy, *, rounds: int, cut: int = 0) -> list[str]:
    """Each conversation in turn, longer each time; with `cut`, its client drops that much of its end."""
    said = dict(TEXTS)
    found = []
    for number in range(rounds):
        for name in said:
            found.append(await ask(kvproxy, name, said[name]))
            said[name] = said[name][: len(said[name]) - cut] + f" and {name} said {number} more"
    return found


async def test_a_sliding_window_without_the_flag_is_recognised_and_left_alone(
    tiny_gemma3: Path, tmp_path: Path
) -> None:
    async with stage(tiny_gemma3, tmp_path) as (_, kvproxy):
        found = await outcomes(kvproxy, rounds=4)
        told = await persistence(kvproxy)
        files = sorted((tmp_path / "slots").iterdir())
        assert found.count("restored") <= 3, found
        assert told["mode"] == "off"
        assert "--swa-full" in told["reason"]
        await outcomes(kvproxy, rounds=1)
        assert sorted((tmp_path / "slots").iterdir()) == files


@pytest.mark.parametrize("model", ["tiny_mamba", "tiny_lfm2"])
async def test_recurrent_state_and_clients_that_rewrite_their_last_turn(
    request: pytest.FixtureRequest, model: str, tmp_path: Path
) -> None:
    async with stage(request.getfixturevalue(model), tmp_path) as (_, kvproxy):
        found = await outcomes(kvproxy, rounds=4, cut=10)
        told = await persistence(kvproxy)
        assert found.count("restored") == 3, found
        assert told["mode"] == "off"
        assert "rewrite their last turn" in told["reason"]


async def test_full_attention_bears_clients_that_rewrite_their_last_turn(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with stage(tiny_llama, tmp_path) as (_, kvproxy):
        found = await outcomes(kvproxy, rounds=4, cut=10)
        assert found[3:] == ["restored"] * 9
        assert (await persistence(kvproxy))["mode"] == "plain"
