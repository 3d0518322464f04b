"""What the canary sees on the real server, and what it must not see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.snapshots import compatibility
from kvproxy.snapshots.canaries import LIFE
from kvproxy.snapshots.canary import TOLERANCE, Canary
from kvproxy.snapshots.compatibility import Compatible, Differs, Identity
from kvproxy.snapshots.fingerprint import fingerprint_of
from kvproxy.upstream import client, late_canary
from kvproxy.upstream.adapters import ask_adapters
from kvproxy.upstream.canary import ask_canary
from kvproxy.upstream.replies import Props, Restored, Saved
from tests.acceptance.conftest import Measured
from tests.support import variants
from tests.support.load import Conversation
from tests.support.load import client as load_client
from tests.support.proxy import KvProxy, make_settings
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

FLAGS = ("-c", "8192", "-np", "2", "--cache-ram", "0")
SLOT = SlotId(0)
NAME = SnapshotName("one")
OTHER_BASE = ("--rope-freq-base", "20000")


@asynccontextmanager
async def asking(server: LlamaServer) -> AsyncIterator[client.LlamaServer]:
    llama = client.LlamaServer(server.base_url, None, connect_timeout_seconds=2.0)
    try:
        yield llama
    finally:
        await llama.close()


async def ask(server: LlamaServer, slot: SlotId = SLOT) -> Canary:
    async with asking(server) as llama:
        canary = await ask_canary(llama, slot)
    assert isinstance(canary, Canary)
    return canary


async def canary_of(model: Path, *flags: str) -> Canary:
    async with LlamaServer(model, *FLAGS, *flags) as server:
        return await ask(server)


async def identity_of(server: LlamaServer) -> Identity:
    async with asking(server) as llama:
        props, adapters = await llama.props(), await ask_adapters(llama)
        assert isinstance(props, Props)
        assert isinstance(adapters, str)
        fingerprint = fingerprint_of(props, await llama.model_meta(), None)
    told = fingerprint.from_dict(fingerprint.as_dict() | {"adapters": adapters})
    return Identity(told, await ask(server), file_version=4)


@pytest.fixture(scope="module")
def canary(tiny_llama: Path) -> Canary:
    return asyncio.run(canary_of(tiny_llama))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("-t", "2"),
        ("-b", "32", "-ub", "16"),
        ("-np", "1"),
        ("-np", "4"),
        ("--kv-unified",),
        ("-c", "1024"),
        ("-fa", "on"),
        ("--swa-full", "--context-shift"),
    ],
    ids=" ".join,
)
async def test_a_life_that_computes_the_same_has_the_same_canary(
    tiny_llama: Path, canary: Canary, flags: tuple[str, ...]
) -> None:
    assert await canary_of(tiny_llama, *flags) == canary


@pytest.mark.parametrize(
    "flags",
    [
        OTHER_BASE,
        ("--rope-freq-base", "10100"),
        ("--rope-scaling", "linear", "--rope-scale", "2"),
        ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "2048"),
        ("-ctk", "q8_0"),
        ("-ctk", "q8_0", "-ctv", "q8_0"),
        ("-ctk", "bf16", "-ctv", "bf16"),
        ("-fa", "off"),
    ],
    ids=" ".join,
)
async def test_flags_that_change_the_kv_change_the_canary(
    tiny_llama: Path, canary: Canary, measured: Measured, flags: tuple[str, ...]
) -> None:
    difference = canary.difference(await canary_of(tiny_llama, *flags))
    measured(f"canary of tiny-llama under {' '.join(flags)}: {difference:.1e}")
    assert difference > 10 * TOLERANCE


@pytest.mark.parametrize("change", [variants.halved_precision, variants.fine_tuned])
async def test_other_weights_of_the_same_shape_change_the_canary(
    tiny_llama: Path, tmp_path: Path, canary: Canary, change: Callable[[Path, Path], Path]
) -> None:
    other = change(tiny_llama, tmp_path / "other.gguf")
    assert canary.difference(await canary_of(other)) > 10 * TOLERANCE


@pytest.mark.parametrize("model", ["tiny_gemma3", "tiny_lfm2"])
async def test_the_faintest_difference_shows_on_other_kinds_of_memory(
    request: pytest.FixtureRequest, model: str
) -> None:
    path: Path = request.getfixturevalue(model)
    plain = await canary_of(path)
    assert await canary_of(path) == plain
    assert not plain.matches(await canary_of(path, "-fa", "off"))
    assert not plain.matches(await canary_of(path, *OTHER_BASE))


async def test_a_recurrent_model_has_a_canary_too(tiny_mamba: Path) -> None:
    assert await canary_of(tiny_mamba) == await canary_of(tiny_mamba, "-t", "2")


async def test_slots_that_are_full_do_not_change_the_canary_of_another(
    tiny_llama: Path, canary: Canary
) -> None:
    flags = (*FLAGS, "--kv-unified", "--no-cache-idle-slots")
    async with LlamaServer(tiny_llama, *flags) as server:
        body = {"prompt": "The sheep went by. " * 40, "id_slot": 0, "n_predict": 4}
        await server.post_json("/completion", body)
        assert await ask(server, SlotId(1)) == canary


async def test_a_slot_that_computes_hardly_changes_the_canary_of_another(
    tiny_llama: Path, canary: Canary, measured: Measured
) -> None:
    body = {"prompt": "Once", "id_slot": 0, "n_predict": 4000, "ignore_eos": True, "stream": True}
    async with LlamaServer(tiny_llama, *FLAGS) as server, aiohttp.ClientSession() as session:
        async with session.post(f"{server.base_url}/completion", json=body) as stream:
            await stream.content.readany()
            beside = await ask(server, SlotId(1))
            assert (await server.slots())[0]["is_processing"]
    measured(f"canary of tiny-llama beside a busy slot: {canary.difference(beside):.1e}")
    assert canary.matches(beside)


async def test_the_server_takes_a_snapshot_of_another_rope_base_and_the_canary_does_not(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with LlamaServer(tiny_llama, *FLAGS, slot_dir=tmp_path) as server:
        saved = await identity_of(server)
        async with asking(server) as llama:
            assert isinstance(await llama.start_save(SLOT, NAME).wait(10), Saved)
        await server.restart()
        assert judged(saved, await identity_of(server)) == Compatible()
    async with LlamaServer(tiny_llama, *FLAGS, *OTHER_BASE, slot_dir=tmp_path) as server:
        present = await identity_of(server)
        async with asking(server) as llama:
            assert isinstance(await llama.start_restore(SLOT, NAME).wait(10), Restored)
    assert present.fingerprint == saved.fingerprint
    assert judged(saved, present) == Differs(("canary",), compatibility.NEAR_CAUSE)


async def test_an_adapter_shows_in_its_field_and_in_the_canary(tiny_llama: Path, tmp_path: Path) -> None:
    lora = variants.adapter(tiny_llama, tmp_path / "lora.gguf")
    async with LlamaServer(tiny_llama, *FLAGS) as server:
        without = await identity_of(server)
    async with LlamaServer(tiny_llama, *FLAGS, "--lora", str(lora)) as server:
        differs = judged(without, await identity_of(server))
        assert isinstance(differs, Differs)
        assert differs.fields == ("adapters", "canary")
        await server.post_json("/lora-adapters", [{"id": 0, "scale": 0.0}])
        assert judged(without, await identity_of(server)) == Compatible()


def judged(saved: Identity, present: Identity) -> Compatible | Differs:
    return compatibility.compare(saved, present, accept_other_builds=True)


async def test_the_canary_of_a_real_model_tells_lives_that_differ(
    chat_model: Path, measured: Measured
) -> None:
    plain = await canary_of(chat_model)
    assert await canary_of(chat_model, "-t", "2", "-ub", "16", "-np", "4") == plain
    for flags in (
        ("--rope-freq-base", "200000"),
        ("--rope-scaling", "linear", "--rope-scale", "2"),
        ("-ctk", "q8_0", "-ctv", "q8_0"),
        ("-fa", "off"),
    ):
        difference = plain.difference(await canary_of(chat_model, *flags))
        measured(f"canary of SmolLM2 under {' '.join(flags)}: {difference:.2f}")
        assert difference > 100 * TOLERANCE, flags


async def test_a_server_that_was_full_of_others_when_it_was_met_is_known_once_a_slot_is_nobodys(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was saved before joins what the next life saves, and is restored there."""
    monkeypatch.setattr(late_canary, "FIRST_PAUSE_SECONDS", 1.0)
    slot_dir, state_dir = tmp_path / "slots", tmp_path / "state"
    slot_dir.mkdir()
    async with LlamaServer(tiny_llama, *FLAGS, slot_dir=slot_dir) as server:
        for slot in (0, 1):
            await server.post_json("/completion", {"prompt": "others", "n_predict": 1, "id_slot": slot})
        settings = make_settings(server.base_url, state_dir, slot_dir)
        async with KvProxy(settings) as proxy, load_client(proxy.base_url) as session:
            await proxy.ready()
            standing = proxy.runtime.standing
            assert standing.facts.canary.startswith(LIFE)
            one = Conversation.about("speaker", 200)
            await one.turn(session)
            await proxy.admin("POST", "flush")
            await proxy.until(lambda: not standing.facts.canary.startswith(LIFE))
            known = standing.facts.fingerprint
            await proxy.at_rest()
            assert (await one.turn(session)).outcome == "resident"

            await server.restart()
            back = await one.turn(session)

            assert (back.outcome, back.reused > back.computed) == ("restored", True)
            assert standing.facts.fingerprint == known
