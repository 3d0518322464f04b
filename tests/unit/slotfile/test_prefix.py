from __future__ import annotations

import errno
import os
import random
import tracemalloc
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvproxy.slotfile import prefix as prefix_module
from kvproxy.slotfile.layout import Layout, Unknown, read_layout, read_token_ids
from kvproxy.slotfile.prefix import MOST_RUNS, Prefix, Uncut, cut_prefix
from kvproxy.slotfile.source import Source
from tests.unit.slotfile import samples
from tests.unit.slotfile.samples import ALL, TOKENS, word

LAYERS = 2
ROW_BYTES = 8
ELEMENTS = 3
TYPES = {2: 1, 4: 0}
"""f16 and f32."""
RANDOM_CASES = 300


def row(layer: int, position: int) -> bytes:
    """Each row tells whose it is."""
    return word(layer, position)


def element(layer: int, index: int, position: int) -> bytes:
    return (layer * 1000 + index * 100 + position).to_bytes(2, "little")


def told(
    positions: Sequence[int],
    *,
    is_transposed: bool = False,
    streams: int = 1,
    stream: int = 0,
    element_bytes: int = 2,
) -> bytes:
    """An attention block whose every row tells its layer and position."""
    count = len(positions)
    parts = [word(streams), word(0) * stream, word(count), samples.cells(positions, stream)]
    parts.append(word(int(is_transposed), LAYERS, 0, 0))
    for layer in range(LAYERS):
        rows = b"".join(row(layer, one) for one in positions)
        parts.append(word(1, ROW_BYTES, 0) + rows)
    for layer in range(10, 10 + LAYERS):
        if is_transposed:
            lines = [
                element(layer, index, one).ljust(element_bytes, b"\0")
                for index in range(ELEMENTS)
                for one in positions
            ]
            parts.append(word(TYPES[element_bytes], element_bytes, ELEMENTS) + b"".join(lines))
        else:
            parts.append(word(1, ROW_BYTES, 0) + b"".join(row(layer, one) for one in positions))
    return b"".join((*parts, word(0) * (streams - stream - 1)))


def cut(data: bytes, tmp_path: Path, tokens: int) -> bytes | Uncut:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(data)
    target.unlink(missing_ok=True)
    found = cut_prefix(source, target, tokens)
    assert source.read_bytes() == data
    assert target.exists() == isinstance(found, Prefix)
    if isinstance(found, Uncut):
        return found
    assert found == Prefix(tokens, target.stat().st_size)
    return target.read_bytes()


TURNED = [*range(12, TOKENS), *range(6), *range(9, 12), *range(6, 9)]
SHAPES = [(False, 1, 0), (True, 1, 0), (False, 4, 2), (True, 4, 2), (True, 3, 0), (False, 3, 2)]


@pytest.mark.parametrize("tokens", [1, 6, 11, TOKENS - 1])
@pytest.mark.parametrize("order", [list(ALL), TURNED])
@pytest.mark.parametrize(("is_transposed", "streams", "stream"), SHAPES)
def test_the_prefix_is_the_file_the_server_would_have_written(
    is_transposed: bool, streams: int, stream: int, order: list[int], tokens: int, tmp_path: Path
) -> None:
    shape = {"is_transposed": is_transposed, "streams": streams, "stream": stream}
    whole = samples.slot_file(TOKENS, told(order, **shape))  # type: ignore[arg-type]
    kept = [position for position in order if position < tokens]

    assert cut(whole, tmp_path, tokens) == samples.slot_file(tokens, told(kept, **shape))  # type: ignore[arg-type]


def test_elements_of_four_bytes_are_cut_whole(tmp_path: Path) -> None:
    shape = {"is_transposed": True, "element_bytes": 4}
    whole = samples.slot_file(TOKENS, told(TURNED, **shape))  # type: ignore[arg-type]
    kept = [position for position in TURNED if position < 11]

    assert cut(whole, tmp_path, 11) == samples.slot_file(11, told(kept, **shape))  # type: ignore[arg-type]


def test_a_file_that_is_shortened_meanwhile_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread, whole = os.pread, samples.slot_file(TOKENS, told(list(ALL), is_transposed=True))
    rows = ELEMENTS * 2 * TOKENS
    monkeypatch.setattr(
        prefix_module.os, "pread", lambda file, count, at: pread(file, count, at)[: count - (count == rows)]
    )

    assert cut(whole, tmp_path, 11) is Uncut.NOT_WRITTEN


@pytest.mark.parametrize("is_transposed", [True, False])
def test_rows_that_are_long_or_many_come_out_the_same(
    is_transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = samples.slot_file(TOKENS, told(TURNED, is_transposed=is_transposed))
    expected = cut(whole, tmp_path, 11)

    monkeypatch.setattr(prefix_module, "CHUNK_BYTES", 2 * 2 * TOKENS)
    assert cut(whole, tmp_path, 11) == expected
    monkeypatch.setattr(prefix_module, "LONG_ROW_BYTES", 1)
    assert cut(whole, tmp_path, 11) == expected


def test_a_bare_list_of_ids_stays_one(tmp_path: Path) -> None:
    whole = samples.plain_slot_file(TOKENS, told(list(ALL)))
    assert cut(whole, tmp_path, 7) == samples.plain_slot_file(7, told(range(7)))


def test_a_model_without_values_can_be_cut(tmp_path: Path) -> None:
    assert isinstance(cut(samples.FULL_WITHOUT_VALUES, tmp_path, 7), bytes)
    assert read_token_ids(tmp_path / "target") == array("i", range(100, 107))


REFUSED = {
    "WINDOW": Uncut.OTHER_MEMORY,
    "WINDOW_NOT_FILLED": Uncut.OTHER_MEMORY,
    "HYBRID": Uncut.OTHER_MEMORY,
    "RECURRENT": Uncut.OTHER_MEMORY,
    "KEY_INDEX": Uncut.OTHER_MEMORY,
    "FULL_EXTENDED": Uncut.MEDIA,
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_memory_and_media_are_not_cut(name: str, tmp_path: Path) -> None:
    assert cut(getattr(samples, name), tmp_path, 5) is REFUSED[name]


def test_positions_that_are_not_the_tokens_places_are_not_cut(tmp_path: Path) -> None:
    shifted = samples.slot_file(TOKENS, told(range(1, TOKENS + 1)))
    doubled = samples.slot_file(TOKENS, told([0, 1, 1, *range(3, TOKENS)]))

    assert cut(shifted, tmp_path, 5) is Uncut.NOT_WHOLE
    assert cut(doubled, tmp_path, 5) is Uncut.NOT_WHOLE


@pytest.mark.parametrize("tokens", [0, -1, TOKENS, TOKENS + 1])
def test_a_prefix_is_shorter_than_the_whole_and_not_empty(tokens: int, tmp_path: Path) -> None:
    assert cut(samples.FULL, tmp_path, tokens) is Uncut.TOO_LONG


def test_cells_in_too_many_pieces_are_not_cut(tmp_path: Path) -> None:
    count = 2 * MOST_RUNS + 4
    order = [one for pair in zip(range(count // 2), range(count // 2, count), strict=True) for one in pair]
    data = samples.slot_file(count, told(order))

    assert isinstance(cut(data, tmp_path, MOST_RUNS), bytes)
    assert cut(data, tmp_path, MOST_RUNS + 1) is Uncut.SCATTERED


@pytest.mark.parametrize("data", [b"", samples.FULL[:-1], samples.FULL + b"\0"])
def test_what_is_not_understood_is_not_cut(data: bytes, tmp_path: Path) -> None:
    assert cut(data, tmp_path, 5) is Uncut.NOT_UNDERSTOOD


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prefix_module, "append", full)

    assert cut(samples.FULL, tmp_path, 5) is Uncut.NOT_WRITTEN


def test_a_cut_that_is_no_snapshot_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_module._Cutter, "_write_rows", lambda *args: None)

    assert cut(samples.FULL, tmp_path, 5) is Uncut.NOT_WRITTEN


@pytest.mark.parametrize("name", ["FULL", "FULL_TRANSPOSED"])
def test_damaged_files_are_refused_or_cut_right(name: str, tmp_path: Path) -> None:
    chance = random.Random(name)
    for _ in range(RANDOM_CASES):
        data = bytearray(getattr(samples, name))
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        tokens = chance.randrange(1, TOKENS)
        if isinstance(cut(bytes(data), tmp_path, tokens), bytes):
            layout = read_layout(tmp_path / "target")
            assert isinstance(layout, Layout)
            assert layout.tokens == tokens


@pytest.mark.parametrize("is_transposed", [True, False])
def test_a_large_file_is_cut_in_bounded_memory(is_transposed: bool, tmp_path: Path) -> None:
    count, row_bytes = 1 << 16, 512
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.write(samples.slot_file(count, word(1, count)))
        cells = array("i", [0, 1, 0]) * count
        cells[::3] = array("i", range(count))
        cells.tofile(file)
        file.write(word(int(is_transposed), 2, 0, 0))
        for layer in range(4):
            is_row = layer < 2 or not is_transposed
            file.write(word(1, row_bytes, 0) if is_row else word(1, 2, row_bytes // 2))
            file.seek(count * row_bytes, 1)
        file.truncate()
    assert source.stat().st_size > 128 << 20

    tracemalloc.start()
    found = cut_prefix(source, tmp_path / "target", count // 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert isinstance(found, Prefix)
    assert peak < 16 << 20


def test_a_file_that_is_shortened_while_it_is_read_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(samples.slot_file(TOKENS, told(list(ALL))))
    layout_of = prefix_module.layout_of

    def shortened(bytes_of: Source) -> Layout | Unknown:
        layout = layout_of(bytes_of)
        assert isinstance(layout, Layout)
        os.truncate(source, 100)
        return layout

    monkeypatch.setattr(prefix_module, "layout_of", shortened)

    assert cut_prefix(source, target, 2) is Uncut.NOT_WRITTEN
    assert not target.exists()
