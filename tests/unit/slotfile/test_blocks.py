from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.slotfile.blocks import AttentionBlock, Block, Cells, RecurrentBlock, readings_at
from kvproxy.slotfile.source import Source
from tests.unit.slotfile.samples import Q8_0, attention, recurrent, tensor, transposed, word

POSITIONS = range(10)


def whole_readings(data: bytes, tmp_path: Path) -> list[Block]:
    """The readings of `data` that use all of it."""
    path = tmp_path / "block"
    path.write_bytes(data)
    with path.open("rb", buffering=0) as file:
        source = Source(file)
        return [block for block in readings_at(source, 0) if block.end == source.size]


def attention_in(data: bytes, tmp_path: Path) -> AttentionBlock:
    (block,) = whole_readings(data, tmp_path)
    assert isinstance(block, AttentionBlock)
    return block


def test_an_attention_block_tells_its_cells_layers_and_types(tmp_path: Path) -> None:
    data = attention(POSITIONS, layers=3, type_id=Q8_0, row_bytes=34, rotations=(128, 64))

    block = attention_in(data, tmp_path)

    assert block.cells == Cells(8, 10, 12, sequence=0, lowest=0, highest=9, is_gapless=True, lowest_at=8)
    assert (block.layers, block.key_type, block.value_type) == (3, 8, 8)
    assert (block.streams, block.stream, block.is_transposed) == (1, 0, False)
    assert (block.key_rotation, block.value_rotation) == (128, 64)
    assert block.row_shapes == {(8, 34)}


def test_every_tensor_is_where_the_block_says(tmp_path: Path) -> None:
    data = attention(POSITIONS, is_transposed=True)

    block = attention_in(data, tmp_path)

    assert [(key.rows, key.row_bytes) for key in block.keys] == [(10, 64)] * 2
    assert [(value.rows, value.row_bytes) for value in block.values] == [(32, 20)] * 2
    assert data[block.keys[0].at :].startswith(tensor(10)[12:])
    last = block.values[-1]
    assert last.at + last.rows * last.row_bytes == block.end == len(data)


@pytest.mark.parametrize("stream", [0, 1, 3])
def test_the_slots_own_stream_is_the_one_with_cells(stream: int, tmp_path: Path) -> None:
    block = attention_in(attention(POSITIONS, streams=4, stream=stream), tmp_path)

    assert (block.streams, block.stream, block.cells.sequence) == (4, stream, stream)


@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("is_extended", [True, False])
@pytest.mark.parametrize("has_values", [True, False])
def test_cells_with_and_without_extension_are_told_apart(
    count: int, is_extended: bool, has_values: bool, tmp_path: Path
) -> None:
    data = attention(range(count), is_extended=is_extended, has_values=has_values)

    block = attention_in(data, tmp_path)

    assert (block.cells.count, block.cells.is_extended) == (count, is_extended)
    assert bool(block.values) == has_values


@pytest.mark.parametrize(
    ("positions", "lowest", "highest", "is_gapless"),
    [
        ([4, 5, 6, 7], 4, 7, True),
        ([6, 7, 4, 5], 4, 7, True),
        ([3, 5, 6, 7], 3, 7, False),
        ([4, 5, 5, 7], 4, 7, False),
    ],
)
def test_gaps_and_doubles_in_the_positions_are_seen(
    positions: list[int], lowest: int, highest: int, is_gapless: bool, tmp_path: Path
) -> None:
    cells = attention_in(attention(positions), tmp_path).cells

    assert (cells.lowest, cells.highest, cells.is_gapless) == (lowest, highest, is_gapless)
    assert cells.lowest_at == cells.at + positions.index(lowest) * cells.cell_bytes


def test_a_recurrent_block_tells_its_position_and_states(tmp_path: Path) -> None:
    (block,) = whole_readings(recurrent(41, layers=4, with_state=2), tmp_path)

    assert isinstance(block, RecurrentBlock)
    assert (block.position, block.layers) == (41, 4)
    assert [state.row_bytes for state in block.states] == [48, 48, 80, 80]


HEAD = word(1, 2, 0, 1, 0, 1, 1, 0)
"""One stream with two cells; what follows would be the tensors' part."""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        word(0),
        attention([0, 1], streams=257),
        word(2, 0, 0),
        attention([0, 1], streams=2, stream=1, sequence=0),
        attention([0, 1], sequence=256),
        attention([-1, 0]),
        HEAD.replace(word(1, 1, 0), word(1, 2, 0)) + word(0, 1, 0, 0) + tensor(2) * 2,
        HEAD.replace(word(1, 1, 0), word(1, 1, 1)) + word(0, 1, 0, 0) + tensor(2) * 2,
        HEAD + word(2, 1, 0, 0) + tensor(2) * 2,
        HEAD + word(0, 513, 0, 0) + tensor(2, 0) * 1026,
        HEAD + word(0, 1, 63, 0) + tensor(2) * 2,
        HEAD + word(0, 1, 0, 96) + tensor(2) * 2,
        HEAD + word(0, 1, 32, 0) + tensor(2) * 2,
        HEAD + word(1, 1, 0, 0) + tensor(2) + transposed(2, element_bytes=4),
        HEAD + word(0, 1, 0, 0) + tensor(2, type_id=5) * 2,
        HEAD + word(0, 1, 0, 0) + tensor(2, 33, Q8_0) * 2,
        HEAD + word(0, 2, 0, 0) + tensor(2) + tensor(2, type_id=0),
        word(2, 5, 0, 0, 1) + tensor(2, 4, 0) + tensor(2, 8, 0),
        word(1, -5, 0, 0, 1) + tensor(1, 4, 0) + tensor(1, 8, 0),
        word(1, 5, 0, 1, 1) + tensor(1, 4, 0) + tensor(1, 8, 0),
        word(1, 5, 1, 0, 1) + tensor(1, 4, 0) + tensor(1, 8, 0),
        word(1, 5, 0, 0, 2) + tensor(1, 4, 0) + tensor(1, 8, 0) + tensor(1, 12, 0) * 2,
        word(1, 5, 0, 0, 0) + tensor(1, 4, 0) + tensor(1, 8, 0),
        word(1, 5, 0, 0, 1) + tensor(1, 4, 0) + tensor(1, 4, 0),
        word(1, 5, 0, 0, 1) + tensor(1, 34, 8) + tensor(1, 68, 8),
        recurrent(5, layers=2, with_state=3),
    ],
)
def test_what_no_server_writes_has_no_reading(data: bytes, tmp_path: Path) -> None:
    assert whole_readings(data, tmp_path) == []
