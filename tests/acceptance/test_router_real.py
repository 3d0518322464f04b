"""A router: one server that starts others for its models, all of which save into one directory."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from kvproxy.upstream.client import ROUTER_ADVICE
from tests.support.daemon import Kvproxy
from tests.support.load import Conversation, client
from tests.support.real import LlamaServer
from tests.support.wiretap import Wiretap

pytestmark = pytest.mark.real

SETTINGS = ("checkpoint.on_idle_seconds=1", "checkpoint.min_tokens=0")


def router(folder: Path, *paths: Path) -> LlamaServer:
    (folder / "slots").mkdir()
    (folder / "models").mkdir()
    for path in paths:
        shutil.copyfile(path, folder / "models" / path.name)
    flags = ("-c", "8192", "-np", "2", "--cache-ram", "0", "--models-dir", str(folder / "models"))
    return LlamaServer(None, *flags, slot_dir=folder / "slots")


async def test_a_file_of_one_model_is_written_over_by_that_of_another(
    tiny_llama: Path, tiny_lfm2: Path, tmp_path: Path
) -> None:
    """What the rule is for."""
    async with router(tmp_path, tiny_llama, tiny_lfm2) as server:
        prompt = {"prompt": "alpha " * 50, "n_predict": 1, "id_slot": 0}
        await server.post_json("/completion", {**prompt, "model": "tiny-llama"})
        for model in ("tiny-llama", "tiny-lfm2"):
            await server.post_json("/slots/0?action=save", {"filename": "same", "model": model})
        restored = await server.post_json(
            "/slots/0?action=restore", {"filename": "same", "model": "tiny-llama"}
        )
    assert restored["n_restored"] == 0


async def test_requests_pass_to_their_models_and_nothing_is_saved(
    tiny_llama: Path, tiny_lfm2: Path, tmp_path: Path
) -> None:
    async with router(tmp_path, tiny_llama, tiny_lfm2) as server, Wiretap(server.port) as tap:
        kvproxy = Kvproxy(tap.url, tmp_path / "state", *SETTINGS, snapshot_dir=tmp_path / "slots")
        async with kvproxy, client(kvproxy.base_url) as session:
            pair = [
                Conversation.about(name, 60, extra={"model": name}) for name in ("tiny-llama", "tiny-lfm2")
            ]
            for _ in range(2):
                for one in pair:
                    answer = await one.turn(session)
                    assert answer.status == 200
                    assert answer.outcome in ("", "cold")
            await asyncio.sleep(2)
            await kvproxy.flush()
            (shown,) = (await kvproxy.status())["servers"]
    assert (shown["state"], shown["reason"]) == ("degraded", ROUTER_ADVICE)
    assert tap.slot_actions() == []
    assert list((tmp_path / "slots").iterdir()) == []
