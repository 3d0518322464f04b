from __future__ import annotations

import os
import random
import tracemalloc
from array import array
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproxy.slotfile import source
from kvproxy.slotfile.layout import Format, Layout, Reason, Unknown, read_layout, read_token_ids
from kvproxy.snapshots.memory_kind import MemoryKind
from tests.unit.slotfile import samples
from tests.unit.slotfile.samples import (
    ALL,
    LAST,
    NEWEST,
    TOKENS,
    attention,
    recurrent,
    slot_file,
    tensor,
    word,
)

KINDS = {
    "FULL": MemoryKind.FULL,
    "FULL_TRANSPOSED": MemoryKind.FULL,
    "FULL_QUANTISED": MemoryKind.FULL,
    "FULL_EXTENDED": MemoryKind.FULL,
    "FULL_WITHOUT_VALUES": MemoryKind.FULL,
    "WINDOW": MemoryKind.SLIDING_WINDOW,
    "WINDOW_NOT_FILLED": MemoryKind.SLIDING_WINDOW,
    "WINDOW_IN_STREAMS": MemoryKind.SLIDING_WINDOW,
    "HYBRID": MemoryKind.HYBRID,
    "HYBRID_EMPTY_S": MemoryKind.HYBRID,
    "HYBRID_WINDOW": MemoryKind.HYBRID,
    "HYBRID_INDEXED": MemoryKind.HYBRID,
    "RECURRENT": MemoryKind.RECURRENT,
    "KEY_INDEX": MemoryKind.UNKNOWN,
}
FILES: dict[str, bytes] = {name: getattr(samples, name) for name in KINDS}
RANDOM_CASES_OF_EACH = 700
"""With fourteen files nearly ten thousand."""


def layout_of(data: bytes, tmp_path: Path, expected_bytes: int | None = None) -> Layout | Unknown:
    path = tmp_path / "slot"
    path.write_bytes(data)
    return read_layout(path, expected_bytes)


def understood(data: bytes, tmp_path: Path) -> Layout:
    layout = layout_of(data, tmp_path)
    assert isinstance(layout, Layout)
    return layout


@pytest.fixture(autouse=True)
def no_read_goes_behind_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread

    def watched(descriptor: int, count: int, at: int) -> bytes:
        assert at + count <= os.fstat(descriptor).st_size
        return pread(descriptor, count, at)

    monkeypatch.setattr(source.os, "pread", watched)


@pytest.mark.parametrize("name", KINDS)
def test_the_blocks_tell_the_kind_and_fill_the_file(name: str, tmp_path: Path) -> None:
    layout = understood(FILES[name], tmp_path)

    assert (layout.kind, layout.tokens, layout.format) == (KINDS[name], TOKENS, Format.PACKED_4)
    assert layout.file_bytes == len(FILES[name]) == layout.blocks[-1].end
    assert all(one.end == other.at for one, other in pairwise(layout.blocks))


def test_a_window_is_as_long_as_its_block_once_a_token_has_left_it(tmp_path: Path) -> None:
    windows = {name: understood(data, tmp_path).window for name, data in FILES.items()}

    assert {name for name, window in windows.items() if window == len(NEWEST)} == {
        "WINDOW",
        "WINDOW_IN_STREAMS",
        "HYBRID_WINDOW",
    }
    assert set(windows.values()) == {len(NEWEST), None}


def test_a_window_whose_oldest_cell_was_moved_is_still_a_window(tmp_path: Path) -> None:
    oldest, *others = NEWEST
    layout = understood(slot_file(TOKENS, attention(ALL), attention([oldest - 1, *others])), tmp_path)

    assert (layout.kind, layout.window) == (MemoryKind.SLIDING_WINDOW, len(NEWEST))
    assert not layout.attention[1].cells.is_gapless


def test_streams_media_and_extended_cells_are_told(tmp_path: Path) -> None:
    layouts = {name: understood(data, tmp_path) for name, data in FILES.items()}

    assert layouts["FULL_TRANSPOSED"].streams == 4
    assert layouts["RECURRENT"].streams is None
    assert [name for name, layout in layouts.items() if layout.media_chunks] == ["FULL_EXTENDED"]
    assert [name for name, layout in layouts.items() if layout.has_extended_cells] == ["FULL_EXTENDED"]


def test_three_attention_blocks_are_of_no_kind_we_know(tmp_path: Path) -> None:
    data = slot_file(TOKENS, attention(ALL), attention(ALL, row_bytes=16), attention(NEWEST))

    assert understood(data, tmp_path).kind is MemoryKind.UNKNOWN


def test_a_model_whose_every_layer_has_a_window_has_a_first_block_without_layers(tmp_path: Path) -> None:
    layout = understood(slot_file(TOKENS, attention(ALL, layers=0), attention(NEWEST)), tmp_path)

    assert (layout.kind, layout.window) == (MemoryKind.SLIDING_WINDOW, len(NEWEST))
    assert layout.attention[0].key_type is None


def test_a_bare_list_of_token_ids_is_read_too(tmp_path: Path) -> None:
    layout = understood(samples.plain_slot_file(TOKENS, attention(ALL)), tmp_path)

    assert (layout.kind, layout.tokens, layout.format) == (MemoryKind.FULL, TOKENS, Format.PLAIN_4)
    assert layout.token_ids_at == 12


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Reason.NOT_A_SLOT_FILE),
        (b"GGUF" + bytes(100), Reason.NOT_A_SLOT_FILE),
        (slot_file(TOKENS, attention(ALL), version=3), Reason.OTHER_FORMAT),
        (slot_file(TOKENS, attention(ALL), version=5), Reason.OTHER_FORMAT),
        (slot_file(0, word(2, 0, 0)), Reason.NO_TOKENS),
        (b"qsgg" + word(4, (1 << 22) + 5, -1, 1, (1 << 22) + 1), Reason.TOO_MANY_TOKENS),
        (slot_file(TOKENS), Reason.NOT_UNDERSTOOD),
        (samples.FULL + b"\0", Reason.NOT_UNDERSTOOD),
        (samples.FULL + attention(ALL)[:-1], Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, attention(range(TOKENS - 1))), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, attention(range(TOKENS + 1))), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, attention(ALL), attention(range(8))), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, attention(ALL), attention(NEWEST, has_values=False)), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, attention(ALL), attention(NEWEST, streams=2)), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, attention(ALL), attention((0, *ALL))), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, attention(ALL), recurrent(LAST), recurrent(LAST)), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, attention(ALL), recurrent(LAST), attention(ALL)), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, attention(ALL), media=[b"x"] * (TOKENS + 1)), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, attention(ALL), recurrent(LAST - 1)), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, recurrent(LAST, layers=4)), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, recurrent(LAST), attention(ALL)), Reason.NOT_UNDERSTOOD),
        (slot_file(TOKENS, *[attention(ALL)] * 4), Reason.NOT_UNDERSTOOD),
        (slot_file(1, word(1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0)), Reason.AMBIGUOUS),
    ],
)
def test_what_is_not_exactly_as_expected_is_unknown(data: bytes, reason: Reason, tmp_path: Path) -> None:
    assert layout_of(data, tmp_path) == Unknown(reason)


@pytest.mark.parametrize(
    "media", [word(TOKENS + 1), word(1, 0), word(1, 0, 0), word(1, 0, 900), word(0, 0), word(1, 0, 4)]
)
def test_media_that_does_not_fill_the_token_block_is_not_understood(media: bytes, tmp_path: Path) -> None:
    block = word(-1, 1, TOKENS, *ALL) + media
    data = b"qsgg" + word(4, len(block) // 4) + block + attention(ALL)

    assert layout_of(data, tmp_path) == Unknown(Reason.NOT_UNDERSTOOD)


def test_what_cannot_be_opened_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("slot")
    os.mkfifo(tmp_path / "pipe")

    for name in ("absent", "link", "pipe", ".", "null\0"):
        assert read_layout(tmp_path / name) == Unknown(Reason.UNREADABLE)
        assert read_token_ids(tmp_path / name) is None


def test_a_file_of_another_size_than_on_record_is_unknown(tmp_path: Path) -> None:
    assert isinstance(layout_of(samples.FULL, tmp_path, len(samples.FULL)), Layout)
    assert layout_of(samples.FULL, tmp_path, len(samples.FULL) + 1) == Unknown(Reason.OTHER_SIZE)


@pytest.mark.parametrize("name", KINDS)
def test_a_file_cut_short_anywhere_but_between_two_blocks_claims_nothing(name: str, tmp_path: Path) -> None:
    """Between two blocks, or between keys and values, the rest is a whole file of its own."""
    data = FILES[name]
    layout = understood(data, tmp_path)
    seams = {block.end for block in layout.blocks}
    seams |= {
        block.values[0].at - 12 for block in layout.attention[:1] if block.values and block.streams == 1
    }
    path = tmp_path / "cut"
    path.write_bytes(data)

    sizes = seams.union(_structure_of(layout), range(0, len(data), 23)) - {len(data)}
    for size in sorted(sizes, reverse=True):
        os.truncate(path, size)
        assert isinstance(read_layout(path, len(data)), Unknown)
        if size not in seams:
            assert isinstance(read_layout(path), Unknown), size


@pytest.mark.parametrize("name", KINDS)
def test_flipped_bits_never_make_another_kind(name: str, tmp_path: Path) -> None:
    chance = random.Random(name)
    heads = _structure_of(understood(FILES[name], tmp_path))
    for _ in range(RANDOM_CASES_OF_EACH):
        data = bytearray(FILES[name])
        for _ in range(chance.randint(1, 3)):
            data[chance.choice(heads)] ^= 1 << chance.randrange(8)
        found = layout_of(bytes(data), tmp_path)
        assert isinstance(found, Unknown) or found.kind in (KINDS[name], MemoryKind.UNKNOWN)


def _structure_of(layout: Layout) -> list[int]:
    """The bytes that are not rows: a flip elsewhere changes nothing."""
    rows: set[int] = set()
    for block in layout.blocks:
        tensors = block.states if not hasattr(block, "keys") else (*block.keys, *block.values)
        for one in tensors:
            rows |= set(range(one.at, one.at + one.rows * one.row_bytes))
    return [at for at in range(layout.file_bytes) if at not in rows]


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.sampled_from([b"", samples.FULL[:12], slot_file(TOKENS), slot_file(TOKENS, attention(ALL))]),
    rest=st.binary(max_size=400) | st.lists(st.integers(0, 4), max_size=100).map(lambda n: word(*n)),
)
def test_no_bytes_make_the_reader_raise(start: bytes, rest: bytes, tmp_path: Path) -> None:
    layout_of(start + rest, tmp_path)
    read_token_ids(tmp_path / "slot")


def test_four_gigabytes_are_read_in_bounded_memory(tmp_path: Path) -> None:
    tokens, layers, row_bytes = 1 << 18, 4, 2_048
    path = tmp_path / "slot"
    with path.open("wb") as file:
        file.write(slot_file(tokens, word(1, tokens)))
        cells = array("i", [0, 1, 0]) * tokens
        cells[::3] = array("i", range(tokens))
        cells.tofile(file)
        file.write(word(0, layers, 0, 0))
        for _ in range(2 * layers):
            file.write(tensor(0, row_bytes))
            file.seek(tokens * row_bytes, os.SEEK_CUR)
        file.truncate()
    tracemalloc.start()
    layout = read_layout(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert isinstance(layout, Layout)
    assert (layout.kind, layout.tokens) == (MemoryKind.FULL, tokens)
    assert layout.file_bytes > 4 << 30
    assert peak < 64 << 20


@pytest.mark.parametrize("words", [word(1, 0x0FFF_FFFF), word(256), word(1, 1 << 20), b"\xff" * 4])
def test_four_gigabytes_of_nothing_are_given_up_at_once(words: bytes, tmp_path: Path) -> None:
    path = tmp_path / "slot"
    path.write_bytes(slot_file(TOKENS, words))
    os.truncate(path, 4 << 30)

    assert read_layout(path) == Unknown(Reason.NOT_UNDERSTOOD)


def test_a_spent_account_ends_in_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if one reading was found: the account was spent while looking for another."""
    assert isinstance(layout_of(samples.FULL, tmp_path), Layout)
    monkeypatch.setattr(source, "MOST_READS", 14)

    assert layout_of(samples.FULL, tmp_path) == Unknown(Reason.NOT_UNDERSTOOD)


def test_token_ids_are_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    for data in (samples.FULL, samples.plain_slot_file(TOKENS, attention(ALL))):
        path.write_bytes(data)
        found = {limit: read_token_ids(path, limit) for limit in (0, 3, TOKENS, 1000, -1)}
        whole = array("i", range(100, 100 + TOKENS))
        assert found == {0: whole[:0], 3: whole[:3], TOKENS: whole, 1000: whole, -1: whole[:0]}
        assert read_token_ids(path) == whole


def test_token_ids_behind_the_end_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    path.write_bytes(samples.FULL[:60])

    assert read_token_ids(path) is None
    assert read_token_ids(path, 9) == array("i", range(100, 109))
