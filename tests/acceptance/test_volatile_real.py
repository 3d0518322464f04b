"""Servers whose slots share one memory: started without `-np`, they clear idle slots; here that costs nearly
nothing, and nothing wrong comes of it. The ceiling is measured in the same run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.identifiers import Epoch, SlotId
from kvproxy.telemetry.events import CheckpointEnded
from tests.acceptance.conftest import Measured, SetStage
from tests.acceptance.six import A_MOMENT, CONTEXT, LAST, TURNS, ceiling_of, conversations, later_share
from tests.support.load import Answer, Conversation, client, run_load
from tests.support.proxy import KvProxy, make_settings
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

DEFAULTS = ("-c", str(4 * CONTEXT))
WITHOUT_RAM_CACHE = (*DEFAULTS, "--cache-ram", "0")
UNIFIED = ("-c", str(4 * CONTEXT), "-np", "4", "--kv-unified", "--no-cache-idle-slots")


@pytest.fixture(scope="module")
def ceiling(tiny_llama: Path) -> float:
    return asyncio.run(ceiling_of(tiny_llama))


@pytest.mark.parametrize(
    ("flags", "concurrency", "allowed"),
    [
        pytest.param(DEFAULTS, 1, 0.01, id="defaults-1"),
        pytest.param(DEFAULTS, 4, None, id="defaults-4"),
        pytest.param(WITHOUT_RAM_CACHE, 1, 0.006, id="without-ram-cache-1"),
        pytest.param(WITHOUT_RAM_CACHE, 4, 0.006, id="without-ram-cache-4"),
        pytest.param(UNIFIED, 1, 0.006, id="unified-1"),
        pytest.param(UNIFIED, 4, 0.006, id="unified-4"),
    ],
)
async def test_a_server_killed_before_the_last_turn_costs_nearly_nothing(
    set_stage: SetStage,
    ceiling: float,
    measured: Measured,
    flags: tuple[str, ...],
    concurrency: int,
    allowed: float | None,
) -> None:
    stage = await set_stage(*flags)

    async def kill_server(turn: int) -> None:
        if turn == LAST:
            await asyncio.sleep(A_MOMENT)
            await stage.llama.restart()

    answers = await run_load(
        stage.url, conversations(), turns=TURNS, concurrency=concurrency, before_turn=kill_server
    )
    share = later_share(answers)
    measured(f"{' '.join(flags)}, concurrency {concurrency}: reuse {share:.4f} of {ceiling:.4f}")
    assert share >= (0.85 if allowed is None else ceiling - allowed)


def wrong(answer: Answer) -> bool:
    """Whether the answer was said to go on from what the server then had to compute."""
    return answer.outcome in ("resident", "restored") and answer.reused < answer.computed


async def test_default_flags_are_found_out_before_anybody_is_served_and_named(set_stage: SetStage) -> None:
    stage = await set_stage(*DEFAULTS)
    (server,) = (await stage.kvproxy.status())["servers"]
    assert (server["volatile_slots"], server["persistence"]["mode"]) == (True, "plain")
    assert "-np" in server["reason"]
    pair = [Conversation.about(f"speaker {n}", 200) for n in range(2)]
    answers = await run_load(stage.url, pair, turns=3)
    assert [answer.outcome for answer in answers[1]] == ["restored", "restored"]
    assert not any(wrong(answer) for turn in answers for answer in turn)
    assert len(stage.kvproxy.events("kv.backend.volatile")) == 1


async def test_20_times_an_emptied_slot_never_replaces_a_snapshot(tiny_llama: Path, tmp_path: Path) -> None:
    """Each time a request that kvproxy knows nothing of is launched just before an answer is saved."""
    slot_dir, state_dir = tmp_path / "slots", tmp_path / "state"
    slot_dir.mkdir()
    async with LlamaServer(tiny_llama, *DEFAULTS, slot_dir=slot_dir) as llama:
        settings = make_settings(llama.base_url, state_dir, slot_dir)
        async with KvProxy(settings) as proxy, client(proxy.base_url) as session:
            await proxy.ready()
            one = Conversation.about("speaker", 200)
            await one.turn(session)
            await proxy.at_rest()
            (manifest,) = (state_dir / "manifests").iterdir()
            published, files = manifest.read_bytes(), sorted(slot_dir.iterdir())

            checkpointer = proxy.runtime.checkpointer
            write = checkpointer.write

            async def empty_and_write(slot: SlotId, epoch: Epoch, trigger: Trigger) -> Any:
                body = {"prompt": "somebody else", "n_predict": 1, "id_slot": (slot + 1) % 4}
                await llama.post_json("/completion", body)
                return await write(slot, epoch, trigger)

            checkpointer.write = empty_and_write  # type: ignore[method-assign]
            ended: list[CheckpointOutcome] = []
            # Where a look at the slots finds it empty first, there is nothing left to save.
            while ended.count(CheckpointOutcome.EMPTY) < 20:
                assert (await one.turn(session)).status == 200
                await proxy.at_rest()
                ended = [event.outcome for event in proxy.heard(CheckpointEnded)]
            assert ended.count(CheckpointOutcome.EMPTY) == len(ended) - 1
            assert (manifest.read_bytes(), sorted(slot_dir.iterdir())) == (published, files)


async def test_a_full_memory_is_made_room_in_and_no_snapshot_blamed(set_stage: SetStage) -> None:
    stage = await set_stage("-c", "4096", "-np", "3", "--kv-unified", "--no-cache-idle-slots")
    trio = [Conversation.about(f"speaker {n}", 200) for n in range(3)]
    async with client(stage.url) as session:
        await trio[0].turn(session)
        await stage.kvproxy.flush()
        await stage.llama.restart()
        for other in trio[1:]:
            await other.turn(session)
        back = await trio[0].turn(session)
        assert (back.outcome, back.reused > back.computed) == ("restored", True)
        assert (await trio[1].turn(session)).outcome == "restored"
