"""The blocks of KV state in a slot file, as llama-server's memory modules write them for one sequence.

An attention block: stream count; per stream its cell count and, unless that is 0, the cells (position,
sequence count 1, maybe an extension, sequence), whether V is transposed, layer count, rotation of K and of
V, a K tensor per layer and (unless the model keeps none) a V tensor per layer.
A recurrent block: cell count 1, position, sequence count 0, a 0, layer count, then for each layer that has
a state its R tensor, and after all of these their S tensors.
A tensor: type, bytes per row, rows of one per cell; transposed V: type, bytes per element, elements per
cell, then one row of all cells per element.

The blocks have no marks. Where bytes can be read in more than one way, all ways are offered, and the whole
file decides: only one of them ends where the file does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from kvproxy.slotfile.source import Source, Unlike

MOST_TOKENS = 1 << 22
"""Bounds what is held of the cells to 16 MB. Beyond it the file would be of hundreds of gigabytes."""
MOST_STREAMS = 256
MOST_LAYERS = 512
"""Both are limits of llama.cpp itself."""
PLAIN_CELL_BYTES = 12
EXTENDED_CELL_BYTES = 24
"""With M-RoPE's second and third position and the token id."""
_CELLS_AT_ONCE = 1 << 16
_SMALLEST_ROTATION = 64

TYPE_NAMES = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    20: "iq4_nl",
    30: "bf16",
}
"""The types that K and V can have, by the number in the file."""
_UNIT_BYTES = {0: 4, 1: 2, 2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 20: 18, 30: 2}
"""The smallest piece of each type: an element, or a block of 32 where it is quantised."""
_STATE_TYPES = (0, 1, 30)


@dataclass(frozen=True, slots=True)
class Tensor:
    """`at` is the first byte of the first row."""

    type_id: int
    at: int
    rows: int
    row_bytes: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.type_id, self.row_bytes


@dataclass(frozen=True, slots=True)
class Cells:
    """`positions` are counted from 0 and need neither be in order nor without gaps.

    `is_gapless`: they are all those from `lowest` to `highest`, each once. Images under M-RoPE and shifted
    contexts are not. `lowest_at` is the first byte of the cell with the lowest.
    """

    at: int
    count: int
    cell_bytes: int
    sequence: int
    lowest: int
    highest: int
    is_gapless: bool
    lowest_at: int

    @property
    def is_extended(self) -> bool:
        return self.cell_bytes == EXTENDED_CELL_BYTES

    @property
    def end(self) -> int:
        return self.at + self.count * self.cell_bytes


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Only the stream `stream` of the `streams` holds cells: a slot's file has one sequence.

    `values` is empty for models that keep no V (latent attention).
    """

    at: int
    end: int
    streams: int
    stream: int
    cells: Cells
    is_transposed: bool
    key_rotation: int
    value_rotation: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def layers(self) -> int:
        return len(self.keys)

    @property
    def key_type(self) -> int | None:
        return self.keys[0].type_id if self.keys else None

    @property
    def value_type(self) -> int | None:
        return self.values[0].type_id if self.values else None

    @property
    def row_shapes(self) -> frozenset[tuple[int, int]]:
        """Type and bytes of a cell's row, of every K tensor."""
        return frozenset(key.shape for key in self.keys)


@dataclass(frozen=True, slots=True)
class RecurrentBlock:
    """`layers` is the model's count; only the layers with a state have tensors."""

    at: int
    end: int
    position: int
    layers: int
    states: tuple[Tensor, ...]


Block = AttentionBlock | RecurrentBlock


def readings_at(source: Source, at: int) -> Iterator[Block]:
    """Every block that the bytes from `at` on can be read as."""
    yield from _attention_readings(source, at)
    yield from _recurrent_readings(source, at)


def _attention_readings(source: Source, at: int) -> Iterator[AttentionBlock]:
    for cell_bytes in (PLAIN_CELL_BYTES, EXTENDED_CELL_BYTES):
        try:
            streams, stream, cells = _read_cells_of_one_stream(source, at, cell_bytes)
        except Unlike:
            continue
        for has_values in (True, False):
            try:
                block = _read_attention(source, at, streams, stream, cells, has_values)
            except Unlike:
                continue
            yield block
            if not block.layers:  # without layers both ways are the same
                break


def _read_cells_of_one_stream(source: Source, at: int, cell_bytes: int) -> tuple[int, int, Cells]:
    (streams,) = source.unpack("<I", at)
    if not 1 <= streams <= MOST_STREAMS:
        raise Unlike
    for stream in range(streams):
        at += 4
        (count,) = source.unpack("<I", at)
        if count:
            cells = read_cells(source, at + 4, count, cell_bytes)
            if streams > 1 and cells.sequence != stream:
                raise Unlike
            return streams, stream, cells
    raise Unlike


def read_cells(source: Source, at: int, count: int, cell_bytes: int) -> Cells:
    if count > MOST_TOKENS:
        raise Unlike
    source.after(at, count * cell_bytes)
    stride = cell_bytes // 4
    positions, sequence = array("i"), -1
    for start in range(0, count, _CELLS_AT_ONCE):
        length = min(_CELLS_AT_ONCE, count - start)
        numbers = source.integers(at + start * cell_bytes, length * stride)
        if sequence < 0:
            sequence = numbers[stride - 1]
        one_sequence_each = numbers[1::stride].count(1) == length
        if not one_sequence_each or numbers[stride - 1 :: stride].count(sequence) != length:
            raise Unlike
        positions += numbers[::stride]
    lowest, highest = min(positions), max(positions)
    if lowest < 0 or not 0 <= sequence < MOST_STREAMS:
        raise Unlike
    lowest_at = at + positions.index(lowest) * cell_bytes
    is_gapless = _are_gapless(positions, lowest, highest)
    return Cells(at, count, cell_bytes, sequence, lowest, highest, is_gapless, lowest_at)


def _are_gapless(positions: array[int], lowest: int, highest: int) -> bool:
    if highest - lowest + 1 != len(positions):
        return False
    if positions == array("i", range(lowest, highest + 1)):  # nearly always, and ten times as fast
        return True
    missing = bytearray(b"\1") * len(positions)
    for position in positions:
        missing[position - lowest] = 0
    return 1 not in missing


def _read_attention(
    source: Source, start: int, streams: int, stream: int, cells: Cells, has_values: bool
) -> AttentionBlock:
    at = cells.end
    transposed, layers, key_rotation, value_rotation = source.unpack("<4I", at)
    if transposed > 1 or layers > MOST_LAYERS or not (_is_rotation(key_rotation, value_rotation)):
        raise Unlike
    keys, at = _read_tensors(source, at + 16, layers, cells.count, is_transposed=False)
    values: tuple[Tensor, ...] = ()
    if has_values:
        values, at = _read_tensors(source, at, layers, cells.count, is_transposed=transposed == 1)
    for _ in range(stream + 1, streams):
        if source.unpack("<I", at) != (0,):
            raise Unlike
        at += 4
    return AttentionBlock(
        start, at, streams, stream, cells, transposed == 1, key_rotation, value_rotation, keys, values
    )


def _is_rotation(*sizes: int) -> bool:
    return all(size == 0 or (size >= _SMALLEST_ROTATION and size.bit_count() == 1) for size in sizes)


def _read_tensors(
    source: Source, at: int, layers: int, cells: int, *, is_transposed: bool
) -> tuple[tuple[Tensor, ...], int]:
    """The tensors of `layers` layers, all of one type, and where they end."""
    read = _read_transposed if is_transposed else _read_tensor
    tensors: list[Tensor] = []
    for _ in range(layers):
        tensor, at = read(source, at, cells)
        if tensor.type_id not in _UNIT_BYTES or tensor.type_id != (tensors or [tensor])[0].type_id:
            raise Unlike
        tensors.append(tensor)
    return tuple(tensors), at


def _read_tensor(source: Source, at: int, cells: int) -> tuple[Tensor, int]:
    type_id, row_bytes = source.unpack("<iQ", at)
    if row_bytes % _UNIT_BYTES.get(type_id, 1):
        raise Unlike
    return Tensor(type_id, at + 12, cells, row_bytes), source.after(at + 12, cells * row_bytes)


def _read_transposed(source: Source, at: int, cells: int) -> tuple[Tensor, int]:
    type_id, element_bytes, elements = source.unpack("<iII", at)
    if element_bytes != _UNIT_BYTES.get(type_id):
        raise Unlike
    tensor = Tensor(type_id, at + 12, elements, cells * element_bytes)
    return tensor, source.after(at + 12, elements * cells * element_bytes)


def _recurrent_readings(source: Source, start: int) -> Iterator[RecurrentBlock]:
    """One for every number of layers with a state that the tensors allow: the file does not tell it."""
    try:
        cells, position, sequences, transposed, layers = source.unpack("<IiIII", start)
    except Unlike:
        return
    if (cells, sequences, transposed) != (1, 0, 0) or position < 0 or not 1 <= layers <= MOST_LAYERS:
        return
    states: list[Tensor] = []
    at = start + 20
    while len(states) < 2 * layers:
        try:
            state, at = _read_tensor(source, at, cells)
        except Unlike:
            return
        if state.type_id not in _STATE_TYPES:
            return
        states.append(state)
        if _are_whole(states):
            yield RecurrentBlock(start, at, position, layers, tuple(states))


def _are_whole(states: list[Tensor]) -> bool:
    """Whether these can be all R and S tensors: one shape for the first half, another for the second.

    A layer's R and S never have the same size; if that were allowed, some of the R tensors alone would pass.
    """
    half, rest = divmod(len(states), 2)
    first, second = ({state.shape for state in part} for part in (states[:half], states[half:]))
    return not rest and len(first) == len(second) == 1 and first != second
