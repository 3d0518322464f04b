from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvproxy.slotfile.layout import Layout, read_layout
from kvproxy.snapshots.memory_kind import MemoryKind
from tests.fakes.snapshot import Geometry, Loaded, Refusal, decode, encode

TOKENS = [1, 70, 71, 72]
HERE = Geometry(streams=2, bytes_per_token=64)
WHOLE = encode(TOKENS, HERE)


def read(data: bytes, geometry: Geometry = HERE) -> Loaded | Refusal:
    return decode(data, geometry)


def test_what_was_written_is_read_back() -> None:
    assert read(WHOLE) == Loaded(TOKENS, len(WHOLE))


def test_the_size_grows_by_an_id_a_cell_and_a_row_per_token() -> None:
    assert len(encode([*TOKENS, 73], HERE)) == len(WHOLE) + 4 + 12 + 64


def test_an_empty_snapshot_is_forty_bytes() -> None:
    empty = encode([], HERE)
    assert len(empty) == 40
    assert read(empty, Geometry(2, "q8_0", 34)) == Loaded([], 40)


@pytest.mark.parametrize(
    ("missing", "refusal"), [(1, Refusal.ABORT), (3, Refusal.ABORT), (4, Refusal.INVALID)]
)
def test_few_missing_bytes_abort_and_more_are_refused(missing: int, refusal: Refusal) -> None:
    assert read(WHOLE[:-missing]) is refusal


@pytest.mark.parametrize("data", [b"", b"qsgg", WHOLE[:30], b"ggsq" + WHOLE[4:]])
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    assert read(data) is Refusal.INVALID


@pytest.mark.parametrize("other", [replace(HERE, streams=1), replace(HERE, kv_type="q8_0")])
def test_another_geometry_is_refused(other: Geometry) -> None:
    assert read(WHOLE, other) is Refusal.INVALID


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_it_is_laid_out_as_a_real_one(streams: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(encode(TOKENS, replace(HERE, streams=streams)))
    layout = read_layout(tmp_path / "file")
    assert isinstance(layout, Layout)
    assert (layout.streams, layout.tokens, layout.kind) == (streams, len(TOKENS), MemoryKind.FULL)


def test_trailing_bytes_are_ignored() -> None:
    assert read(WHOLE + b"x") == Loaded(TOKENS, len(WHOLE))


def test_a_longer_snapshot_keeps_the_bytes_of_its_prefix() -> None:
    longer = encode([*TOKENS, 73], HERE)
    assert WHOLE[-4 * 64 - 4 : -4] in longer
