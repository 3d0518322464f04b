"""Prefixes cut out of snapshots, on the real server: restored as so many tokens, and continued right."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from kvproxy.slotfile.layout import Layout, read_layout
from kvproxy.slotfile.prefix import Prefix, Uncut, cut_prefix
from tests.acceptance.conftest import Measured
from tests.support.likely import Opinion, erase, opinion, put, restore, save
from tests.support.load import words
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

NOISE = 1e-3
"""Between two ways to compute the same on a CPU, in the distance of two opinions."""
SHAPES = {
    "1 slot": ("-np", "1"),
    "2 slots, values transposed": ("-np", "2", "-fa", "off"),
    "3 slots in one memory": ("-np", "3", "--kv-unified", "--no-cache-idle-slots"),
    "8 bits": ("-np", "1", "-ctk", "q8_0", "-ctv", "q8_0"),
}


async def cut(source: Path, target: Path, tokens: int) -> Prefix | Uncut:
    return await asyncio.to_thread(cut_prefix, source, target, tokens)


def some_ids(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(32, 200) for _ in range(count)]


@pytest.mark.parametrize("shape", SHAPES)
async def test_random_cuts_restore_as_so_many_tokens_and_go_on_like_a_cold_run(
    shape: str,
    tiny_llama: Path,
    tmp_path: Path,
    measured: Measured,
    repeats: Callable[[int, int], int],
) -> None:
    flags, chance, cuts = SHAPES[shape], random.Random(shape), repeats(4, 13)
    slot, prompt = int(flags[1]) - 1, some_ids(1, 900)
    distances = []
    async with LlamaServer(tiny_llama, "-c", "8192", "--cache-ram", "0", *flags, slot_dir=tmp_path) as server:
        await put(server, prompt, slot)
        assert await save(server, "whole", slot) == len(prompt)
        await server.restart()
        for number in range(cuts):
            tokens = chance.randrange(1, len(prompt))
            name = f"cut{number}"
            found = await cut(tmp_path / "whole", tmp_path / name, tokens)
            assert found == Prefix(tokens, (tmp_path / name).stat().st_size)
            following = [*prompt[:tokens], 65, 66]
            await erase(server, slot)
            cold = await opinion(server, following, slot)
            await erase(server, slot)
            assert await restore(server, name, slot) == tokens
            restored = await opinion(server, following, slot)
            assert restored.reused == tokens
            distances.append(cold.distance(restored))
    measured(f"{cuts} cuts of {len(prompt)} tokens, {shape}: distance from a cold run {max(distances):.6f}")
    assert max(distances) < NOISE


async def test_a_slot_that_was_turned_back_is_cut_where_its_cells_lie(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Several slots in one memory: the cells of one lie wherever there was room."""
    flags = ("-c", "2048", "-np", "2", "--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0")
    first, second = some_ids(2, 300), some_ids(3, 300)
    async with LlamaServer(tiny_llama, *flags, slot_dir=tmp_path) as server:
        for end in (100, 200, 300):
            await put(server, first[:end], 0)
            await put(server, second[:end], 1)
        await put(server, [*first[:150], *second[:200]], 0)
        await save(server, "whole", 0)
        layout = read_layout(tmp_path / "whole")
        assert isinstance(layout, Layout)
        assert isinstance(await cut(tmp_path / "whole", tmp_path / "cut", 250), Prefix)
        following = [*first[:150], *second[:100], 65]
        await erase(server, 0)
        cold = await opinion(server, following, 0)
        await erase(server, 0)
        assert await restore(server, "cut", 0) == 250
        restored = await opinion(server, following, 0)
    assert restored.reused == 250
    assert cold.distance(restored) < NOISE


@pytest.mark.parametrize("flash_attention", ["on", "off"])
async def test_a_real_model_goes_on_from_a_cut_as_a_live_slot_of_so_many_tokens_does(
    flash_attention: str, chat_model: Path, tmp_path: Path, measured: Measured
) -> None:
    flags = ("-c", "2048", "-np", "1", "--cache-ram", "0", "-t", "2", "-fa", flash_attention)
    async with LlamaServer(chat_model, *flags, slot_dir=tmp_path) as server:
        text = words("cut", 250)
        ids = (await server.post_json("/tokenize", {"content": text, "add_special": True}))["tokens"]
        await put(server, ids)
        await save(server, "whole")
        points = [len(ids) * share // 5 for share in range(4, 0, -1)]
        lives: list[Opinion] = []
        colds: list[Opinion] = []
        for tokens in points:
            await erase(server)
            await put(server, ids[:tokens])
            lives.append(await opinion(server, ids[: tokens + 3]))
            await erase(server)
            colds.append(await opinion(server, ids[: tokens + 3]))
        distances = []
        for cold, tokens in zip(colds, points, strict=True):
            assert isinstance(await cut(tmp_path / "whole", tmp_path / f"cut{tokens}", tokens), Prefix)
            await erase(server)
            assert await restore(server, f"cut{tokens}") == tokens
            restored = await opinion(server, ids[: tokens + 3])
            assert restored.reused == tokens
            distances.append(cold.distance(restored))
    live = [cold.distance(one) for cold, one in zip(colds, lives, strict=True)]
    measured(
        f"SmolLM2, cuts, flash attention {flash_attention}: distance from a cold run {mean(distances):.5f},"
        f" of a live slot {mean(live):.5f}"
    )
    assert distances == pytest.approx(live, abs=1e-6)


@pytest.mark.parametrize("flash_attention", ["on", "off"])
async def test_a_cut_is_quick(
    flash_attention: str, chat_model: Path, tmp_path: Path, measured: Measured
) -> None:
    """A figure, and a bound so wide that only another way of doing it could break it."""
    flags = ("-c", "2048", "-np", "1", "--cache-ram", "0", "-t", "2", "-fa", flash_attention)
    async with LlamaServer(chat_model, *flags, slot_dir=tmp_path) as server:
        await put(server, [1] * 1400)
        await save(server, "whole")
    taken = []
    for number in range(5):
        began = time.perf_counter()
        found = await cut(tmp_path / "whole", tmp_path / f"cut{number}", 700)
        taken.append(time.perf_counter() - began)
        assert isinstance(found, Prefix)
    assert found.size_bytes > 15 << 20
    measured(
        f"{found.size_bytes / 1e6:.1f} MB cut, flash attention {flash_attention}: {min(taken) * 1000:.1f} ms"
        f" (most {max(taken) * 1000:.1f})"
    )
    assert min(taken) < 5
