"""One snapshot directory under servers that compute something else: never restored, the field is named."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from scripts.ports import free_port
from tests.acceptance.conftest import Measured
from tests.support import variants
from tests.support.daemon import Kvproxy
from tests.support.load import CHAT, Answer, Conversation, client
from tests.support.real import LlamaServer
from tests.support.wiretap import Wiretap

pytestmark = pytest.mark.real

FLAGS = ("-c", "8192", "-np", "2", "--cache-ram", "0")
QUIET = ("checkpoint.on_idle_seconds=0", "checkpoint.min_tokens=0")
MISMATCH = ("cold", "fingerprint-mismatch")
RESTORED = ("restored", "")


@dataclass(slots=True)
class Stage:
    """One kvproxy and one directory; the servers change."""

    directory: Path
    port: int
    kvproxy: Kvproxy
    tap: Wiretap
    one: Conversation

    @asynccontextmanager
    async def served(self, model: Path, *flags: str) -> AsyncIterator[aiohttp.ClientSession]:
        server = LlamaServer(model, *FLAGS, *flags, slot_dir=self.directory, port=self.port)
        lives = len(self._lives())
        async with server, client(self.kvproxy.base_url) as session:
            async with asyncio.timeout(10):
                while len(self._lives()) == lives:  # noqa: ASYNC110 - another process sets no event
                    await asyncio.sleep(0.02)
            self.tap.forget()
            yield session

    def _lives(self) -> list[Any]:
        return self.kvproxy.events("kv.backend.ready", "kv.backend.restarted")

    async def keep(self, model: Path, *flags: str) -> None:
        """Have a first turn, and save it."""
        async with self.served(model, *flags) as session:
            await self.one.turn(session)
            await self.kvproxy.flush()

    async def come_back(self, model: Path, *flags: str) -> Answer:
        """The same question to the server as it is now; what it answers is not kept."""
        messages, asked = self.one.messages, self.one.asked
        async with self.served(model, *flags) as session:
            answer = await self.one.turn(session)
        self.one.messages, self.one.asked = messages, asked
        return answer

    async def told(self, model: Path, *flags: str) -> tuple[str, str]:
        answer = await self.come_back(model, *flags)
        return answer.outcome, answer.reason

    async def difference(self) -> str:
        """What the last skipped restore said, and the status of the snapshot says as well."""
        said = str(self.kvproxy.events("kv.session.restore.skipped")[-1]["detail"])
        named = said.removeprefix("differs in ").partition(":")[0].split(", ")
        (session,) = (await self.kvproxy.session(self.one.name))["sessions"]
        shown: list[dict[str, Any]] = session["snapshots"]
        assert named in [one["differs_in"] for one in shown]
        return ",".join(named)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    slots = tmp_path / "slots"
    slots.mkdir()
    port = free_port()
    async with Wiretap(port) as tap:
        kvproxy = Kvproxy(tap.url, tmp_path / "state", *QUIET, snapshot_dir=slots)
        await kvproxy.start(wait_for_server=False)
        try:
            yield Stage(slots, port, kvproxy, tap, Conversation.about("one", 60))
        finally:
            await kvproxy.kill()


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy whose content can change under its name."""
    return shutil.copyfile(tiny_llama, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    "flags",
    [
        ("--rope-freq-base", "20000"),
        ("--rope-scaling", "linear", "--rope-scale", "2"),
        ("-ctk", "q8_0", "-ctv", "q8_0"),
        ("-fa", "off"),
    ],
    ids=" ".join,
)
async def test_a_server_with_other_flags_is_told_by_its_canary_and_the_first_one_gets_its_snapshot_back(
    stage: Stage, model: Path, flags: tuple[str, ...]
) -> None:
    await stage.keep(model)
    assert await stage.told(model, *flags) == MISMATCH
    assert "restore" not in [action for action, _ in stage.tap.slot_actions()]
    assert await stage.difference() == "canary"
    assert await stage.told(model) == RESTORED


async def test_another_division_of_the_memory_is_named_and_its_snapshot_not_blamed(
    stage: Stage, model: Path
) -> None:
    await stage.keep(model)
    assert await stage.told(model, "--kv-unified") == MISMATCH
    (skipped,) = stage.kvproxy.events("kv.session.restore.skipped")
    assert skipped["detail"].startswith("differs in --kv-unified: the server was started without it then")
    assert stage.kvproxy.events("kv.snapshot.invalidated") == []
    assert await stage.told(model) == RESTORED


async def test_an_adapter_is_named(stage: Stage, model: Path, tmp_path: Path) -> None:
    lora = variants.adapter(model, tmp_path / "lora.gguf")
    await stage.keep(model)
    assert await stage.told(model, "--lora", str(lora)) == MISMATCH
    assert await stage.difference() == "adapters,canary"
    assert await stage.told(model, "--lora", str(lora), "--lora-init-without-apply") == MISMATCH
    assert await stage.told(model) == RESTORED


async def test_another_quantisation_under_the_same_name_is_told(
    stage: Stage, model: Path, tiny_llama: Path
) -> None:
    await stage.keep(model)
    variants.halved_precision(tiny_llama, model)
    assert await stage.told(model) == MISMATCH
    assert "canary" in await stage.difference()
    shutil.copyfile(tiny_llama, model)
    assert await stage.told(model) == RESTORED


async def test_a_restart_and_what_does_not_change_the_kv_cost_nothing(
    stage: Stage, model: Path, measured: Measured
) -> None:
    await stage.keep(model)
    for flags in ((), ("-t", "2"), ("-b", "64", "-ub", "32"), ("-t", "2", "-b", "512", "-lv", "1")):
        answer = await stage.come_back(model, *flags)
        assert (answer.outcome, answer.reason) == RESTORED, flags
        measured(f"reused under {' '.join(flags) or 'the same flags'}: {answer.reused}/{answer.prompt}")


async def test_a_kvproxy_started_again_before_a_server_with_full_slots_knows_its_own(
    stage: Stage, model: Path
) -> None:
    """Nothing can be asked of a server whose slots all hold something: it is known by its marker."""
    two = Conversation.about("two", 60)
    async with stage.served(model) as session:
        await stage.one.turn(session)
        await two.turn(session)
        await stage.kvproxy.flush()
        before = (await stage.kvproxy.status())["servers"][0]
        await stage.kvproxy.kill()
        await stage.kvproxy.start()
        after = (await stage.kvproxy.status())["servers"][0]
        answer = await stage.one.turn(session)
    assert (after["canary"], after["fingerprint"]) == (before["canary"], before["fingerprint"])
    assert (answer.outcome, answer.reason) == RESTORED
    assert answer.reused > answer.prompt // 2


async def test_the_model_file_tells_what_kind_of_memory_it_has(
    stage: Stage, model: Path, tiny_mamba: Path, tiny_gemma3: Path, tiny_lfm2: Path
) -> None:
    kinds = []
    for path in (model, tiny_gemma3, tiny_lfm2, tiny_mamba):
        async with stage.served(path):
            kinds.append((await stage.kvproxy.status())["servers"][0]["memory"]["kind"])
    assert kinds == ["full", "sliding-window", "hybrid", "recurrent"]


async def test_a_real_model_with_another_kv_type_or_rope_is_never_given_the_snapshot(
    stage: Stage, chat_model: Path
) -> None:
    await stage.keep(chat_model)
    for flags in (("-ctk", "q8_0", "-ctv", "q8_0"), ("--rope-freq-base", "200000")):
        assert await stage.told(chat_model, *flags) == MISMATCH
        assert await stage.difference() == "canary"
    assert await stage.told(chat_model, "-t", "2") == RESTORED


async def drop(session: aiohttp.ClientSession) -> None:
    """A client that leaves in mid-answer: a reason to look at the slots."""
    wish = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 2000, "stream": True}
    async with session.post(CHAT, json=wish, headers={"X-Session-Id": "leaver"}) as response:
        assert b"data: " in await response.content.readline()
        response.close()


async def test_somebody_elses_request_in_a_slot_ends_the_stay_there(stage: Stage, model: Path) -> None:
    async with stage.served(model, "-np", "3") as session:
        await stage.one.turn(session)
        await stage.kvproxy.flush()
        (slot,) = [one["id"] for one in await stage.kvproxy.slots() if one["occupant"]]
        await drop(session)
        await stage.kvproxy.until_slots(lambda one: one["state"] in ("idle", "resident"))
        async with client(f"http://127.0.0.1:{stage.port}") as direct:
            body = {"prompt": "Somebody else.", "id_slot": slot, "n_predict": 2}
            async with direct.post("/completion", json=body) as response:
                assert (await response.json())["id_slot"] == slot
        await drop(session)
        (warned,) = await stage.kvproxy.until_events("kv.warning", 1)
        assert f"seen in slot {slot}" in warned["message"]
        back = await stage.one.turn(session)
    assert (back.status, back.outcome) == (200, "restored")
