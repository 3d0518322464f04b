"""Slot files and model files as they really are, read by our own readers."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import gguf
import pytest

from kvproxy.slotfile.layout import AttentionBlock, Layout, read_layout, read_token_ids
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream.gguf import read_model_traits
from scripts import models
from scripts.tiny_models import HEAD_WIDTH, KV_HEADS, LAYERS, SLIDING_WINDOW, Kind
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

FULL, WINDOW, HYBRID, RECURRENT, _ = MemoryKind
KINDS = {Kind.LLAMA: FULL, Kind.GEMMA3: WINDOW, Kind.LFM2: HYBRID, Kind.MAMBA: RECURRENT}
COMMON = ("-c", "4096", "--cache-ram", "0")
F16, Q8_0 = 1, 8
ROW_BYTES = {F16: 2 * HEAD_WIDTH * KV_HEADS, Q8_0: 34 * HEAD_WIDTH * KV_HEADS // 32}
LONG, SHORT = "a long walk through many words " * 5, "a short one"


@dataclass(frozen=True)
class Flags:
    slots: int
    is_unified: bool = False
    flash_attention: str = "on"
    kv_type: int = F16
    is_window_whole: bool = False

    def __str__(self) -> str:
        return " ".join(self.arguments)

    @property
    def arguments(self) -> tuple[str, ...]:
        name = {F16: "f16", Q8_0: "q8_0"}[self.kv_type]
        unified = ("--kv-unified", "--no-cache-idle-slots") if self.is_unified else ()
        whole = ("--swa-full",) if self.is_window_whole else ()
        types = ("-ctk", name, "-ctv", name)
        return ("-np", str(self.slots), "-fa", self.flash_attention, *types, *unified, *whole)

    @property
    def streams(self) -> int:
        return 1 if self.is_unified else self.slots


COMBINATIONS = (
    Flags(1),
    Flags(1, flash_attention="off"),
    Flags(2, is_window_whole=True),
    Flags(2, is_unified=True, flash_attention="off"),
    Flags(3, kv_type=Q8_0),
    Flags(3, is_unified=True, kv_type=Q8_0, is_window_whole=True),
    Flags(4, flash_attention="off", is_window_whole=True),
    Flags(4, is_unified=True),
)


async def complete(server: LlamaServer, prompt: Any, slot: int, answer: int = 3) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": answer, "id_slot": slot, "cache_prompt": True, "ignore_eos": True}
    answered: dict[str, Any] = await server.post_json("/completion", body)
    return answered


async def saved(server: LlamaServer, slot: int) -> Path:
    assert server.slot_dir
    answer = await server.post_json(f"/slots/{slot}?action=save", {"filename": "saved"})
    path = server.slot_dir / "saved"
    assert path.stat().st_size == answer["n_written"]
    return path


def understood(path: Path) -> Layout:
    layout = read_layout(path)
    assert isinstance(layout, Layout)
    return layout


@pytest.mark.parametrize("flags", COMBINATIONS, ids=str)
@pytest.mark.parametrize("model", Kind)
async def test_the_layout_is_right_whatever_the_flags(model: Kind, flags: Flags, tmp_path: Path) -> None:
    async with LlamaServer(models.tiny(model), *COMMON, *flags.arguments, slot_dir=tmp_path) as server:
        for slot, prompt in ((flags.slots - 1, LONG), (0, SHORT)):
            answer = await complete(server, prompt, slot)
            layout = understood(await saved(server, slot))
            assert layout.kind is KINDS[model]
            assert layout.tokens == answer["tokens_evaluated"] + answer["tokens_predicted"] - 1
            is_windowed = model is Kind.GEMMA3 and layout.tokens > SLIDING_WINDOW
            assert layout.window == (SLIDING_WINDOW if is_windowed else None)
            assert layout.streams == (None if model is Kind.MAMBA else flags.streams)
            assert not layout.media_chunks
            assert not layout.has_extended_cells
            for block in layout.attention:
                check_attention(block, flags, slot)
            with_cache = LAYERS if model is Kind.LLAMA else LAYERS // 2
            assert {block.layers for block in layout.attention} <= {with_cache}


SMALL = (
    Flags(1),
    Flags(2, flash_attention="off"),
    Flags(3, kv_type=Q8_0),
    Flags(4, is_unified=True, kv_type=Q8_0),
    Flags(2, is_unified=True, flash_attention="off", is_window_whole=True),
)


@pytest.mark.parametrize("flags", SMALL, ids=str)
@pytest.mark.parametrize("name", ["chat_model", "window_model"])
async def test_the_layout_of_a_real_model_is_right(
    request: pytest.FixtureRequest, name: str, flags: Flags, tmp_path: Path
) -> None:
    """Both have heads that 8-bit blocks fit into; the window of one is 512 tokens long."""
    model, slot = request.getfixturevalue(name), flags.slots - 1
    ids = [5 + number % 900 for number in range(530)]
    async with LlamaServer(model, *COMMON, *flags.arguments, "-t", "2", slot_dir=tmp_path) as server:
        await complete(server, ids, slot, answer=0)
        layout = understood(await saved(server, slot))

    is_windowed = name == "window_model"
    assert (layout.kind, layout.tokens) == (WINDOW if is_windowed else FULL, len(ids))
    assert layout.window == (512 if is_windowed else None)
    assert layout.streams == flags.streams
    traits = await asyncio.to_thread(read_model_traits, model)
    assert traits is not None
    assert traits.sliding_window == layout.window
    assert sum(block.layers for block in layout.attention) == traits.blocks
    for block in layout.attention:
        assert (block.key_type, block.value_type) == (flags.kv_type, flags.kv_type)
        assert block.is_transposed == (flags.flash_attention == "off")
        assert (block.cells.sequence, block.cells.is_gapless) == (slot, True)
    found = read_token_ids(tmp_path / "saved")
    assert found is not None
    assert found.tolist() == ids


def check_attention(block: AttentionBlock, flags: Flags, slot: int) -> None:
    assert (block.key_type, block.value_type) == (flags.kv_type, flags.kv_type)
    assert block.is_transposed == (flags.flash_attention == "off")
    assert {key.row_bytes for key in block.keys} == {ROW_BYTES[flags.kv_type]}
    assert block.cells.sequence == slot
    assert block.cells.is_gapless


@pytest.mark.parametrize("model", Kind)
async def test_the_token_ids_are_the_servers(model: Kind, tmp_path: Path) -> None:
    async with LlamaServer(models.tiny(model), *COMMON, "-np", "1", slot_dir=tmp_path) as server:
        body = {"content": LONG, "add_special": True}
        ids = (await server.post_json("/tokenize", body))["tokens"]
        await complete(server, LONG, 0)
        path = await saved(server, 0)

    found = read_token_ids(path, len(ids))
    assert found is not None
    assert found.tolist() == ids


@pytest.mark.parametrize("model", Kind)
async def test_a_slot_with_a_history_is_understood(model: Kind, tmp_path: Path) -> None:
    """Rolled back, broken off in its answer, restored and continued."""
    async with LlamaServer(models.tiny(model), *COMMON, "-np", "2", slot_dir=tmp_path) as server:
        await complete(server, LONG, 1, answer=40)
        await complete(server, LONG[:-20] + "elsewhere", 1)
        assert understood(await saved(server, 1)).kind is KINDS[model]
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await asyncio.wait_for(complete(server, LONG, 1, answer=2_000), 0.05)
        assert understood(await saved(server, 1)).kind is KINDS[model]
        await server.restart()
        await server.post_json("/slots/0?action=restore", {"filename": "saved"})
        await complete(server, LONG + "and on", 0)
        assert understood(await saved(server, 0)).kind is KINDS[model]


@pytest.mark.parametrize("flash_attention", ["on", "off"])
async def test_cells_of_a_model_with_m_rope_are_recognised(flash_attention: str, tmp_path: Path) -> None:
    model = tmp_path / "m-rope.gguf"
    write_with_m_rope(models.tiny(Kind.LLAMA), model)
    flags = (*COMMON, "-np", "2", "-fa", flash_attention)
    async with LlamaServer(model, *flags, slot_dir=tmp_path) as server:
        answer = await complete(server, LONG, 1)
        layout = understood(await saved(server, 1))

    assert layout.has_extended_cells
    assert (layout.kind, layout.streams) == (FULL, 2)
    assert layout.tokens == answer["tokens_evaluated"] + answer["tokens_predicted"] - 1


def write_with_m_rope(source: Path, target: Path) -> None:
    """The same weights under an architecture whose positions have several parts."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen2vl")
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *of = entry.types
        writer.add_key_value(name.replace("llama.", "qwen2vl."), entry.contents(), kind, *of)
    writer.add_rope_dimension_sections([HEAD_WIDTH // 8] * 3 + [0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("model", Kind)
def test_a_model_file_tells_the_kind_the_server_then_shows(model: Kind) -> None:
    traits = read_model_traits(models.tiny(model))

    assert traits is not None
    assert (traits.architecture, traits.kind) == (model.value, KINDS[model])
    assert traits.blocks == LAYERS
    assert traits.window == (SLIDING_WINDOW if model is Kind.GEMMA3 else None)
