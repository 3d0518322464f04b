from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvproxy.cli import main
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

FLAGS = ("-c", "4096", "-np", "2", "--cache-ram", "0")


@dataclass(frozen=True)
class Found:
    code: int
    report: dict[str, Any]

    @property
    def results(self) -> dict[str, str]:
        return {check["name"]: check["result"] for check in self.report["checks"]}

    @property
    def degraded(self) -> dict[str, str]:
        checks = self.report["checks"]
        return {check["name"]: check["detail"] for check in checks if check["result"] == "degraded"}

    @property
    def changes(self) -> list[str]:
        return [change["change"] for change in self.report["changes"]]


@pytest.fixture
def slot_dir(tmp_path: Path) -> Path:
    (tmp_path / "slots").mkdir()
    return tmp_path / "slots"


class Doctor:
    def __init__(self, state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._state_dir = state_dir
        self._capsys = capsys

    async def __call__(self, url: str, *flags: str) -> Found:
        where = ["--upstream", url, "--state-dir", str(self._state_dir)]
        code = await asyncio.to_thread(main, ["doctor", "--json", *where, *flags])
        return Found(code, json.loads(self._capsys.readouterr().out))


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(tmp_path / "state", capsys)


async def held(server: LlamaServer) -> list[int]:
    return [slot.get("n_prompt_tokens", 0) for slot in await server.slots()]


async def test_full_attention_is_ready_and_nothing_stays_behind(
    tiny_llama: Path, slot_dir: Path, doctor: Doctor
) -> None:
    async with LlamaServer(tiny_llama, *FLAGS, slot_dir=slot_dir) as server:
        for _ in range(2):
            found = await doctor(server.base_url, "--snapshot-dir", str(slot_dir))
            assert found.code == 0, found.report
            assert found.results == dict.fromkeys(found.results, "ok") | {"window edit": "skipped"}
            assert found.report["proven"]
            assert list(slot_dir.iterdir()) == []
            assert await held(server) == [0, 0]


async def test_a_memory_of_earlier_prompts_in_the_server_changes_nothing(
    tiny_gemma3: Path, slot_dir: Path, doctor: Doctor
) -> None:
    async with LlamaServer(tiny_gemma3, "-c", "4096", "-np", "2", slot_dir=slot_dir) as server:
        for _ in range(2):
            assert (await doctor(server.base_url)).code == 1


async def test_no_save_path_names_the_flag(tiny_llama: Path, doctor: Doctor) -> None:
    async with LlamaServer(tiny_llama, *FLAGS) as server:
        found = await doctor(server.base_url)
        assert await held(server) == [0, 0]
    assert found.code == 1
    assert found.degraded.keys() == {"save path"}
    assert found.changes == ["llama-server --slot-save-path DIR"]


async def test_default_flags_are_volatile(tiny_llama: Path, slot_dir: Path, doctor: Doctor) -> None:
    async with LlamaServer(tiny_llama, slot_dir=slot_dir) as server:
        found = await doctor(server.base_url)
    assert found.code == 1
    assert found.degraded.keys() == {"idle slots"}
    assert "volatile" in found.degraded["idle slots"]
    assert "-np N" in found.changes[0]


@pytest.mark.parametrize("flags", [("-kvu", "--no-cache-idle-slots"), ("--cache-ram", "0")])
async def test_each_flag_that_is_named_against_clearing_helps(
    tiny_llama: Path, slot_dir: Path, doctor: Doctor, flags: tuple[str, ...]
) -> None:
    async with LlamaServer(tiny_llama, *flags, slot_dir=slot_dir) as server:
        assert (await doctor(server.base_url)).code == 0


async def test_a_sliding_window_reuses_nothing_and_the_named_flag_helps(
    tiny_gemma3: Path, slot_dir: Path, doctor: Doctor
) -> None:
    async with LlamaServer(tiny_gemma3, *FLAGS, slot_dir=slot_dir) as server:
        found = await doctor(server.base_url)
    assert found.code == 1
    assert found.degraded.keys() == {"reuse", "mode"}
    assert "reuses nothing: 0 of 600 tokens" in found.degraded["reuse"]
    assert found.changes == ["llama-server --swa-full"]
    async with LlamaServer(tiny_gemma3, *FLAGS, "--swa-full", slot_dir=slot_dir) as server:
        assert (await doctor(server.base_url)).code == 0


async def test_a_sliding_window_is_opened_where_the_files_are_seen(
    tiny_gemma3: Path, slot_dir: Path, doctor: Doctor
) -> None:
    seen = ("--snapshot-dir", str(slot_dir))
    async with LlamaServer(tiny_gemma3, *FLAGS, slot_dir=slot_dir) as server:
        found = await doctor(server.base_url, *seen)
        assert (found.code, found.report["proven"]) == (0, True), found.report
        assert found.results["window edit"] == "ok"
        assert list(slot_dir.iterdir()) == []
        off = await doctor(server.base_url, *seen, "--set", "restore.window_edit=off")
    assert (off.code, off.results["window edit"]) == (1, "skipped")
    assert off.changes == ["llama-server --swa-full"]


@pytest.mark.parametrize("model", ["tiny_mamba", "tiny_lfm2"])
async def test_recurrent_state_serves_an_exact_continuation_only(
    request: pytest.FixtureRequest, model: str, slot_dir: Path, doctor: Doctor
) -> None:
    async with LlamaServer(request.getfixturevalue(model), *FLAGS, slot_dir=slot_dir) as server:
        found = await doctor(server.base_url)
    assert found.code == 1
    assert found.degraded.keys() == {"reuse"}
    assert "exact continuation (600 of 600 tokens)" in found.degraded["reuse"]
    assert "reuses 0 of 632 tokens" in found.degraded["reuse"]


async def test_nothing_that_listens_is_unusable(tiny_llama: Path, doctor: Doctor) -> None:
    found = await doctor(LlamaServer(tiny_llama).base_url)
    assert found.code == 2
    assert found.results["reachable"] == "unusable"


async def test_a_wrong_snapshot_directory_is_named_and_so_is_the_file(
    tiny_llama: Path, slot_dir: Path, doctor: Doctor, tmp_path: Path
) -> None:
    async with LlamaServer(tiny_llama, *FLAGS, slot_dir=slot_dir) as server:
        found = await doctor(server.base_url, "--snapshot-dir", str(tmp_path))
    assert found.code == 1
    assert found.degraded.keys() == {"snapshot directory"}
    (file,) = slot_dir.iterdir()
    assert file.stat().st_size < 200
    details = {check["name"]: check["detail"] for check in found.report["checks"]}
    assert file.name in details["probe file"]


async def test_a_missing_key_names_the_setting(tiny_llama: Path, slot_dir: Path, doctor: Doctor) -> None:
    async with LlamaServer(tiny_llama, *FLAGS, "--api-key", "right", slot_dir=slot_dir) as server:
        without = await doctor(server.base_url)
        with_key = await doctor(server.base_url, "--set", "upstreams.0.api_key=right")
    assert (without.code, with_key.code) == (1, 0)
    assert without.changes == ["upstreams[].api_key: KEY"]


async def test_a_conversation_in_every_slot_is_left_alone(
    tiny_llama: Path, slot_dir: Path, doctor: Doctor
) -> None:
    async with LlamaServer(tiny_llama, *FLAGS, slot_dir=slot_dir) as server:
        for slot in (0, 1):
            body = {"prompt": f"{slot} is mine", "id_slot": slot, "n_predict": 4}
            await server.post_json("/completion", body)
        before = await held(server)
        found = await doctor(server.base_url)
        assert await held(server) == before
    assert found.code == 1
    assert found.degraded.keys() == {"probe"}


async def test_a_sleeping_server_sleeps_on(tiny_llama: Path, slot_dir: Path, doctor: Doctor) -> None:
    sleepy = LlamaServer(tiny_llama, *FLAGS, "--sleep-idle-seconds", "1", slot_dir=slot_dir)
    async with sleepy as server, asyncio.timeout(30):
        while not (await server.props())["is_sleeping"]:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.1)
        found = await doctor(server.base_url)
        assert (await server.props())["is_sleeping"]
    assert found.code == 1
    assert "sleeps" in found.degraded["sleep"]
