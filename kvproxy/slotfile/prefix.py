"""The snapshot of the first tokens of a longer one, cut out of its file.

With full attention what a token left in the cache depends on the tokens before it alone, so the first cells
and their rows are, byte for byte, the snapshot of the first tokens. Of a window or a running state only the
end is kept, and nothing can be cut.

Nothing is held but a chunk and the positions of the cells. Keys, and values as they are kept with flash
attention, have a row for each cell: what is kept of them lies together. Without it values are kept the other
way round, one row of all cells for each element, and a piece of every row is kept.
"""

from __future__ import annotations

import errno
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvproxy.slotfile.blocks import AttentionBlock, Tensor
from kvproxy.slotfile.copying import CHUNK_BYTES, append, create_like, transfer
from kvproxy.slotfile.layout import Format, Layout, Unknown, layout_of, read_layout
from kvproxy.slotfile.source import Source, Unlike
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.opened import open_regular

LONG_ROW_BYTES = 32 << 10
"""To read what is not kept of a longer row takes longer than another call."""
MOST_RUNS = 64
"""A slot that was turned back and went on has its cells in a few pieces; more are not worth the pieces."""
_TENSOR_HEAD_BYTES = 12
_BLOCK_HEAD_BYTES = 16


class Uncut(StrEnum):
    """Why there is no prefix."""

    NOT_UNDERSTOOD = "not-understood"
    OTHER_MEMORY = "other-memory"
    """Something else than full attention."""
    MEDIA = "media"
    """Pictures or sound, or positions of several parts."""
    NOT_WHOLE = "not-whole"
    """Positions are missing."""
    SCATTERED = "scattered"
    """The cells are in too many pieces."""
    TOO_LONG = "too-long"
    """Not fewer tokens than there are, or none."""
    NOT_WRITTEN = "not-written"


@dataclass(frozen=True, slots=True)
class Prefix:
    """What was written."""

    tokens: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Cells that lie together: the index of the first, and how many."""

    start: int
    count: int


def obstacle_to_cutting(layout: Layout) -> Uncut | None:
    """Why no prefix of this snapshot can be cut; None if one can."""
    blocks = layout.blocks
    if layout.kind is not MemoryKind.FULL or len(blocks) != 1:
        return Uncut.OTHER_MEMORY
    if layout.media_chunks or layout.has_extended_cells:
        return Uncut.MEDIA
    cells = layout.attention[0].cells
    is_whole = cells.is_gapless and (cells.lowest, cells.highest) == (0, layout.tokens - 1)
    return None if is_whole else Uncut.NOT_WHOLE


def cut_prefix(source: Path, target: Path, tokens: int) -> Prefix | Uncut:
    """Write `target`, the snapshot of the first `tokens` of those in `source`.

    Blocks for as long as it takes to move that part. `target` must not exist, and does not after a refusal.
    It is neither synced nor is its name.
    """
    try:
        return _cut(source, target, tokens)
    except (OSError, ValueError, Unlike):
        # A full disk, or a file that was taken from under us: what is there stays what it was.
        return Uncut.NOT_WRITTEN


def _cut(source: Path, target: Path, tokens: int) -> Prefix | Uncut:
    with open_regular(source) as file:
        bytes_of = Source(file)
        layout = layout_of(bytes_of)
        if isinstance(layout, Unknown):
            return Uncut.NOT_UNDERSTOOD
        if (obstacle := obstacle_to_cutting(layout)) is not None:
            return obstacle
        if not 0 < tokens < layout.tokens:
            return Uncut.TOO_LONG
        runs = _runs_of(bytes_of, layout.attention[0], tokens)
        if len(runs) > MOST_RUNS:
            return Uncut.SCATTERED
        descriptor = create_like(target, file.fileno())
        try:
            _Cutter(file.fileno(), descriptor, runs, tokens).write(layout)
            size = os.fstat(descriptor).st_size
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    if _is_cut(read_layout(target, size), layout, tokens):
        return Prefix(tokens, size)
    target.unlink(missing_ok=True)
    return Uncut.NOT_WRITTEN


def _runs_of(source: Source, block: AttentionBlock, tokens: int) -> list[_Run]:
    """Where the cells of the first `tokens` lie, at most one more run than are allowed."""
    cells, stride = block.cells, block.cells.cell_bytes // 4
    step = CHUNK_BYTES // cells.cell_bytes
    runs: list[_Run] = []
    for start in range(0, cells.count, step):
        length = min(step, cells.count - start)
        numbers = source.integers(cells.at + start * cells.cell_bytes, length * stride)
        for run in _kept(numbers[::stride], start, tokens):
            if runs and runs[-1].start + runs[-1].count == run.start:
                runs[-1] = _Run(runs[-1].start, runs[-1].count + run.count)
            else:
                runs.append(run)
            if len(runs) > MOST_RUNS:
                return runs
    return runs


def _kept(positions: array[int], first: int, tokens: int) -> list[_Run]:
    """The runs of cells below position `tokens`; `first` is the index of the first cell."""
    count = len(positions)
    if positions == array("i", range(positions[0], positions[0] + count)):
        # In order, as nearly always, and a hundred times as fast.
        kept = min(count, tokens - positions[0])
        return [_Run(first, kept)] if kept > 0 else []
    runs: list[_Run] = []
    begun = -1
    for index, position in enumerate((*positions, tokens)):
        if position < tokens and begun < 0:
            begun = index
        elif position >= tokens and begun >= 0:
            runs.append(_Run(first + begun, index - begun))
            begun = -1
    return runs


class _Cutter:
    def __init__(self, source: int, target: int, runs: Sequence[_Run], tokens: int) -> None:
        self._source = source
        self._target = target
        self._runs = runs
        self._tokens = tokens

    def write(self, layout: Layout) -> None:
        block = layout.attention[0]
        self._write_head(layout)
        append(self._target, struct.pack("<I", block.streams) + bytes(4 * block.stream))
        append(self._target, struct.pack("<I", self._tokens))
        self._write_rows(block.cells.at, block.cells.cell_bytes)
        transfer(self._source, block.cells.end, _BLOCK_HEAD_BYTES, self._target)
        for key in block.keys:
            self._write_tensor(key)
        for value in block.values:
            if block.is_transposed:
                self._write_transposed(value, block.cells.count)
            else:
                self._write_tensor(value)
        append(self._target, bytes(4 * (block.streams - block.stream - 1)))

    def _write_head(self, layout: Layout) -> None:
        """Magic and version as they are, then the shorter token block."""
        is_packed = layout.format is Format.PACKED_4
        words = self._tokens + (4 if is_packed else 0)
        transfer(self._source, 0, 8, self._target)
        append(self._target, struct.pack("<I", words))
        if is_packed:
            append(self._target, struct.pack("<iiI", -1, 1, self._tokens))
        transfer(self._source, layout.token_ids_at, 4 * self._tokens, self._target)
        if is_packed:
            append(self._target, bytes(4))

    def _write_tensor(self, tensor: Tensor) -> None:
        transfer(self._source, tensor.at - _TENSOR_HEAD_BYTES, _TENSOR_HEAD_BYTES, self._target)
        self._write_rows(tensor.at, tensor.row_bytes)

    def _write_rows(self, at: int, row_bytes: int) -> None:
        for run in self._runs:
            transfer(self._source, at + run.start * row_bytes, run.count * row_bytes, self._target)

    def _write_transposed(self, tensor: Tensor, cells: int) -> None:
        transfer(self._source, tensor.at - _TENSOR_HEAD_BYTES, _TENSOR_HEAD_BYTES, self._target)
        element_bytes, row_bytes = tensor.row_bytes // cells, tensor.row_bytes
        pieces = [(run.start * element_bytes, run.count * element_bytes) for run in self._runs]
        if row_bytes > LONG_ROW_BYTES:
            for row in range(tensor.rows):
                for start, count in pieces:
                    transfer(self._source, tensor.at + row * row_bytes + start, count, self._target)
            return
        rows = CHUNK_BYTES // row_bytes
        for first in range(0, tensor.rows, rows):
            count = min(rows, tensor.rows - first)
            self._write_pieces(tensor.at + first * row_bytes, count, row_bytes, pieces)

    def _write_pieces(self, at: int, rows: int, row_bytes: int, pieces: Sequence[tuple[int, int]]) -> None:
        """The pieces of many short rows: a call for each would take longer than to read it all."""
        data = os.pread(self._source, rows * row_bytes, at)
        if len(data) < rows * row_bytes:
            raise OSError(errno.EIO, "the file ended before its time")
        kept = b"".join(
            data[row + start : row + start + count]
            for row in range(0, rows * row_bytes, row_bytes)
            for start, count in pieces
        )
        append(self._target, kept)


def _is_cut(found: Layout | Unknown, before: Layout, tokens: int) -> bool:
    """Whether what was written is a snapshot of the same model with fewer tokens."""
    if isinstance(found, Unknown) or len(found.blocks) != 1:
        return False
    one, other = found.attention[0], before.attention[0]
    shapes = (
        (one.row_shapes, one.layers, len(one.values)),
        (other.row_shapes, other.layers, len(other.values)),
    )
    same = (found.kind, found.format, found.streams) == (before.kind, before.format, before.streams)
    return same and shapes[0] == shapes[1] and found.tokens == tokens
