"""Opened windows on the real server, without kvproxy: what is reused, and whether the answers are right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from kvproxy.slotfile.window import Closed, open_window
from scripts.tiny_models import SLIDING_WINDOW
from tests.acceptance.conftest import Measured
from tests.support.likely import erase, opinion, put, restore, save
from tests.support.load import words
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

WINDOW = 512
"""Of Gemma 3 270M."""
REAL = ("-c", "2048", "-np", "1", "--cache-ram", "0", "-t", "2")
TINY = ("-c", "16384", "--cache-ram", "0")
NOISE = 1e-3
"""Between two ways to compute the same on a CPU, in the distance of two opinions."""


async def opened(source: Path, target: Path, window: int) -> Closed | None:
    return await asyncio.to_thread(open_window, source, target, window)


async def bring_back_opened(server: LlamaServer, folder: Path, prompt: list[int]) -> None:
    """Put `prompt` into the slot, save it, open its window, and restore that into the next process."""
    await put(server, prompt)
    await save(server, "closed")
    assert await opened(folder / "closed", folder / "open", SLIDING_WINDOW) is None
    await server.restart()
    await restore(server, "open")


def some_ids(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(32, 200) for _ in range(count)]


@pytest.mark.parametrize(
    "flags",
    [
        ("-np", "1"),
        ("-np", "2"),
        ("-np", "3", "-fa", "off"),
        ("-np", "2", "--kv-unified", "--no-cache-idle-slots"),
        ("-np", "1", "-ctk", "q8_0", "-ctv", "q8_0"),
        ("-np", "2", "--swa-full"),
    ],
    ids=" ".join,
)
async def test_an_opened_window_is_gone_on_from_after_a_restart(
    flags: tuple[str, ...], tiny_gemma3: Path, tmp_path: Path
) -> None:
    slot = int(flags[1]) - 1
    prompt = some_ids(1, 500)
    async with LlamaServer(tiny_gemma3, *TINY, *flags, slot_dir=tmp_path) as server:
        await put(server, prompt, slot)
        live = await opinion(server, [*prompt, 65, 66], slot)
        await erase(server, slot)
        cold = await opinion(server, [*prompt, 65, 66], slot)
        await erase(server, slot)
        await put(server, prompt, slot)
        assert await save(server, "closed", slot) == len(prompt)
        assert await opened(tmp_path / "closed", tmp_path / "open", SLIDING_WINDOW) is None
        await server.restart()
        assert await restore(server, "open", slot) == len(prompt)
        restored = await opinion(server, [*prompt, 65, 66], slot)
    assert (cold.reused, live.reused, restored.reused) == (0, len(prompt), len(prompt))
    assert cold.distance(restored) <= cold.distance(live) + 1e-6


async def test_a_window_that_was_not_opened_is_worth_nothing(tiny_gemma3: Path, tmp_path: Path) -> None:
    prompt = some_ids(2, 500)
    async with LlamaServer(tiny_gemma3, *TINY, "-np", "1", slot_dir=tmp_path) as server:
        await put(server, prompt)
        await save(server, "closed")
        await server.restart()
        await restore(server, "closed")
        assert await put(server, [*prompt, 65]) == 0


@pytest.mark.parametrize("count", [5, SLIDING_WINDOW - 1, SLIDING_WINDOW])
async def test_a_prompt_no_longer_than_the_window_is_left_alone(
    count: int, tiny_gemma3: Path, tmp_path: Path
) -> None:
    async with LlamaServer(tiny_gemma3, *TINY, "-np", "1", slot_dir=tmp_path) as server:
        await put(server, some_ids(3, count))
        await save(server, "closed")
    assert await opened(tmp_path / "closed", tmp_path / "open", SLIDING_WINDOW) is Closed.NO_WINDOW


@pytest.mark.parametrize("count", [SLIDING_WINDOW + 1, SLIDING_WINDOW + 2, 2 * SLIDING_WINDOW])
async def test_a_prompt_hardly_longer_than_the_window_is_gone_on_from(
    count: int, tiny_gemma3: Path, tmp_path: Path
) -> None:
    prompt = some_ids(4, count)
    async with LlamaServer(tiny_gemma3, *TINY, "-np", "1", slot_dir=tmp_path) as server:
        cold = await opinion(server, [*prompt, 65])
        await erase(server)
        await bring_back_opened(server, tmp_path, prompt)
        restored = await opinion(server, [*prompt, 65])
    assert restored.reused == count
    assert cold.distance(restored) < NOISE


@pytest.mark.parametrize("dropped", [1, 5, SLIDING_WINDOW, 2 * SLIDING_WINDOW, 300])
async def test_a_prompt_that_drops_tokens_of_an_opened_window_is_computed_anew_and_right(
    dropped: int, tiny_gemma3: Path, tmp_path: Path
) -> None:
    prompt = some_ids(5, 500)
    shorter = [*prompt[: len(prompt) - dropped], 65, 66, 67]
    async with LlamaServer(tiny_gemma3, *TINY, "-np", "1", slot_dir=tmp_path) as server:
        cold = await opinion(server, shorter)
        await erase(server)
        await bring_back_opened(server, tmp_path, prompt)
        after = await opinion(server, shorter)
    assert after.reused == 0
    assert cold.distance(after) < NOISE


@pytest.mark.parametrize("dropped", [1, 5, 30])
async def test_a_restored_slot_that_went_on_may_be_turned_back_to_where_it_was_restored(
    dropped: int, tiny_gemma3: Path, tmp_path: Path
) -> None:
    """What was computed since is whole, so the server takes it; what it then says is right."""
    prompt, more = some_ids(6, 500), some_ids(7, 30)
    wanted = [*prompt, *more[: len(more) - dropped], 65, 66]
    async with LlamaServer(tiny_gemma3, *TINY, "-np", "1", slot_dir=tmp_path) as server:
        cold = await opinion(server, wanted)
        await erase(server)
        await bring_back_opened(server, tmp_path, prompt)
        assert await put(server, [*prompt, *more]) == len(prompt)
        after = await opinion(server, wanted)
    assert cold.distance(after) < NOISE


async def test_a_window_opened_turn_after_turn_stays_right(tiny_gemma3: Path, tmp_path: Path) -> None:
    prompt = some_ids(8, 200)
    async with LlamaServer(tiny_gemma3, *TINY, "-np", "1", slot_dir=tmp_path) as server:
        await put(server, prompt)
        for turn in range(6):
            await save(server, f"closed{turn}")
            there = tmp_path / f"open{turn}"
            assert await opened(tmp_path / f"closed{turn}", there, SLIDING_WINDOW) is None
            await erase(server)
            assert await restore(server, there.name) == len(prompt)
            longer = [*prompt, *some_ids(100 + turn, (1, 3, 20, 63, 64, 150)[turn])]
            assert await put(server, longer) == len(prompt)
            prompt = longer
        after = await opinion(server, [*prompt, 65])
        await erase(server)
        cold = await opinion(server, [*prompt, 65])
    assert after.reused == len(prompt)
    assert cold.distance(after) < NOISE


async def test_a_real_model_says_after_a_restore_what_it_says_in_a_live_slot(
    window_model: Path, tmp_path: Path, measured: Measured, repeats: Callable[[int, int], int]
) -> None:
    count = repeats(3, 20)
    async with LlamaServer(window_model, *REAL, slot_dir=tmp_path) as server:
        prompts = []
        for number in range(count):
            text = f"Read this and answer. {words(number, 560)}. What was the first word?"
            ids = (await server.post_json("/tokenize", {"content": text, "add_special": True}))["tokens"]
            assert len(ids) > WINDOW + 8
            prompts.append(ids)
        lives, colds = [], []
        for number, ids in enumerate(prompts):
            await put(server, ids[:-8])
            await save(server, f"closed{number}")
            lives.append(await opinion(server, ids))
            await erase(server)
            colds.append(await opinion(server, ids))
            await erase(server)
            assert await opened(tmp_path / f"closed{number}", tmp_path / f"open{number}", WINDOW) is None
        await server.restart()
        restoreds = []
        for number, ids in enumerate(prompts):
            assert await restore(server, f"open{number}") == len(ids) - 8
            restoreds.append(await opinion(server, ids))
    assert [one.reused for one in restoreds] == [len(ids) - 8 for ids in prompts]
    live = [cold.distance(one) for cold, one in zip(colds, lives, strict=True)]
    restored = [cold.distance(one) for cold, one in zip(colds, restoreds, strict=True)]
    measured(
        f"gemma3-270m, {count} prompts restored after a kill: distance from a cold run"
        f" {mean(restored):.5f} (most {max(restored):.5f}), of a live slot {mean(live):.5f} ({max(live):.5f})"
    )
    assert mean(restored) <= mean(live) + 1e-4
    assert max(restored) <= max(live) + NOISE


async def test_a_window_kept_in_full_is_turned_back_behind_what_was_restored_and_wrong_there(
    tiny_gemma3: Path, tmp_path: Path
) -> None:
    """Why kvproxy does not let it come to that: the server reuses what it lacks a part of, and is silent."""
    prompt = some_ids(1, 500)
    longer = [*prompt, *some_ids(2, 40)]
    turned = [*prompt[: 500 - SLIDING_WINDOW + 4], *some_ids(3, 20)]
    async with LlamaServer(tiny_gemma3, *TINY, "-np", "1", "--swa-full", slot_dir=tmp_path) as server:
        cold = await opinion(server, turned)
        await erase(server)
        await put(server, prompt)
        await put(server, longer)
        live = await opinion(server, turned)
        await put(server, prompt)
        await save(server, "one.kv")
        await erase(server)
        await restore(server, "one.kv")
        assert await put(server, longer) == len(prompt)
        restored = await opinion(server, turned)
    assert live.reused == restored.reused == len(turned) - 20
    assert cold.distance(live) < NOISE < cold.distance(restored)
