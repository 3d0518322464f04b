from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvproxy.clock import SystemClock
from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.upstream import client
from kvproxy.upstream.replies import (
    ActionFailure,
    Erased,
    Fault,
    Obstacle,
    Props,
    Restored,
    Saved,
    Unavailable,
)
from kvproxy.upstream.sentinel import Sentinel
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

FLAGS = ("-c", "8192", "-np", "2", "--cache-ram", "0")
SLOT = SlotId(1)
PROMPT = "It was a dark and stormy night. " * 20


@asynccontextmanager
async def asking(server: LlamaServer, api_key: str | None = None) -> AsyncIterator[client.LlamaServer]:
    llama = client.LlamaServer(server.base_url, api_key, connect_timeout_seconds=2.0)
    try:
        yield llama
    finally:
        await llama.close()


async def fill(server: LlamaServer) -> None:
    body = {"prompt": PROMPT, "id_slot": SLOT, "cache_prompt": True, "n_predict": 4}
    answer = await server.post_json("/completion", body)
    assert answer["tokens_evaluated"] >= len(PROMPT)


async def test_props_slots_and_meta_are_read(tiny_llama: Path, tmp_path: Path) -> None:
    async with LlamaServer(tiny_llama, *FLAGS, slot_dir=tmp_path) as server, asking(server) as llama:
        props = await llama.props()
        assert isinstance(props, Props)
        assert (props.total_slots, props.n_ctx, props.has_marker) == (2, 4096, True)
        await fill(server)
        slots = await llama.slots()
        assert not isinstance(slots, Unavailable)
        assert [(slot.id, slot.is_processing) for slot in slots] == [(0, False), (1, False)]
        assert slots[1].n_prompt_tokens is not None
        assert slots[1].n_prompt_tokens >= len(PROMPT)
        assert (await llama.model_meta())["n_params"] > 0


async def test_a_slot_is_saved_erased_and_restored(tiny_llama: Path, tmp_path: Path) -> None:
    async with LlamaServer(tiny_llama, *FLAGS, slot_dir=tmp_path) as server, asking(server) as llama:
        await fill(server)
        saved = await llama.start_save(SLOT, SnapshotName("one")).wait(10)
        assert isinstance(saved, Saved)
        assert saved.tokens >= len(PROMPT)
        assert saved.size_bytes == (tmp_path / "one").stat().st_size
        assert saved.seconds is not None
        assert await llama.start_erase(SLOT).wait(10) == Erased(saved.tokens)
        restored = await llama.start_restore(SLOT, SnapshotName("one")).wait(10)
        assert isinstance(restored, Restored)
        assert (restored.tokens, restored.size_bytes) == (saved.tokens, saved.size_bytes)


async def test_a_restore_of_nothing_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    async with LlamaServer(tiny_llama, *FLAGS, slot_dir=tmp_path) as server, asking(server) as llama:
        outcome = await llama.start_restore(SLOT, SnapshotName("none")).wait(10)
        assert isinstance(outcome, ActionFailure)
        assert (outcome.fault, outcome.status) == (Fault.REFUSED, 400)
        assert "Unable to restore slot" in outcome.message


async def test_asking_for_slot_actions_touches_neither_slot_nor_directory(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with LlamaServer(tiny_llama, *FLAGS, slot_dir=tmp_path) as server, asking(server) as llama:
        await server.post_json("/completion", {"prompt": PROMPT, "id_slot": 0, "n_predict": 4})
        before = await llama.slots()
        assert await llama.actions_supported() is None
        assert await llama.slots() == before
        assert list(tmp_path.iterdir()) == []


async def test_a_server_without_a_save_path_supports_no_actions(tiny_llama: Path) -> None:
    async with LlamaServer(tiny_llama, *FLAGS) as server, asking(server) as llama:
        outcome = await llama.actions_supported()
        assert isinstance(outcome, ActionFailure)
        assert (outcome.fault, outcome.status) == (Fault.UNSUPPORTED, 501)
        assert "--slot-save-path" in outcome.message


async def test_without_the_servers_key_management_is_unauthorized(tiny_llama: Path, tmp_path: Path) -> None:
    keyed = LlamaServer(tiny_llama, *FLAGS, "--api-key", "right", "--no-slots", slot_dir=tmp_path)
    async with keyed as server:
        for key in (None, "wrong"):
            async with asking(server, key) as llama:
                assert await llama.props() == Unavailable(Obstacle.UNAUTHORIZED, "Invalid API Key")
                outcome = await llama.actions_supported()
                assert outcome == ActionFailure(Fault.UNAUTHORIZED, "Invalid API Key", 401)
        async with asking(server, "right") as llama:
            assert isinstance(await llama.props(), Props)
            assert await llama.actions_supported() is None
            slots = await llama.slots()
            assert isinstance(slots, Unavailable)
            assert slots.reason is Obstacle.UNSUPPORTED


@asynccontextmanager
async def watching(server: LlamaServer) -> AsyncIterator[asyncio.Queue[tuple[str, float]]]:
    """What a sentinel tells, each with its time."""
    told: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
    sentinel = Sentinel(
        "127.0.0.1",
        server.port,
        None,
        api_key=None,
        on_break=lambda: told.put_nowait(("break", time.perf_counter())),
        on_connect=lambda: told.put_nowait(("connect", time.perf_counter())),
        clock=SystemClock(),
        interval_seconds=0.2,
    )
    running = asyncio.get_running_loop().create_task(sentinel.run())
    try:
        assert (await asyncio.wait_for(told.get(), 10))[0] == "connect"
        yield told
    finally:
        sentinel.close()
        await asyncio.wait_for(running, 10)


async def test_the_sentinel_sees_a_kill_at_once_and_the_next_life(tiny_llama: Path) -> None:
    async with LlamaServer(tiny_llama, *FLAGS) as server, watching(server) as told:
        start = time.perf_counter()
        await server.kill()
        kind, at = await asyncio.wait_for(told.get(), 10)
        assert kind == "break"
        assert at - start < 0.25  # 2 ms on an idle machine; far below the time a restart needs in any case
        await server.start()
        assert (await asyncio.wait_for(told.get(), 10))[0] == "connect"


async def test_the_sentinel_outlives_the_servers_request_limit_unbroken(tiny_llama: Path) -> None:
    async with LlamaServer(tiny_llama, *FLAGS) as server:
        told: list[str] = []
        sentinel = Sentinel(
            "127.0.0.1",
            server.port,
            None,
            api_key=None,
            on_break=lambda: told.append("break"),
            on_connect=lambda: told.append("connect"),
            clock=SystemClock(),
            interval_seconds=0.005,
        )
        running = asyncio.get_running_loop().create_task(sentinel.run())
        await asyncio.sleep(2.0)  # about 300 questions
        sentinel.close()
        await running
        assert told == ["connect"]


async def test_the_sentinel_does_not_delay_a_sigterm(tiny_llama: Path) -> None:
    async with LlamaServer(tiny_llama, *FLAGS) as server, watching(server) as told:
        start = time.perf_counter()
        await server.stop()
        assert time.perf_counter() - start < 2.0
        assert (await asyncio.wait_for(told.get(), 10))[0] == "break"
