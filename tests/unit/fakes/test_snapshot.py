from __future__ import annotations

import pytest

from tests.fakes.snapshot import Loaded, Refusal, decode, encode

TOKENS = [1, 70, 71, 72]
WHOLE = encode(TOKENS, geometry="g", bytes_per_token=64)


def read(data: bytes, geometry: str = "g") -> Loaded | Refusal:
    return decode(data, geometry=geometry, bytes_per_token=64)


def test_what_was_written_is_read_back() -> None:
    assert read(WHOLE) == Loaded(TOKENS, len(WHOLE))


def test_the_size_grows_by_ids_and_filler_per_token() -> None:
    assert len(encode([*TOKENS, 73], geometry="g", bytes_per_token=64)) == len(WHOLE) + 4 + 64


def test_an_empty_snapshot_is_forty_bytes() -> None:
    empty = encode([], geometry="g", bytes_per_token=64)
    assert len(empty) == 40
    assert read(empty, geometry="other") == Loaded([], 40)


@pytest.mark.parametrize(
    ("missing", "refusal"), [(1, Refusal.ABORT), (3, Refusal.ABORT), (4, Refusal.INVALID)]
)
def test_few_missing_bytes_abort_and_more_are_refused(missing: int, refusal: Refusal) -> None:
    assert read(WHOLE[:-missing]) is refusal


@pytest.mark.parametrize("data", [b"", b"qsgg", WHOLE[:30], b"ggsq" + WHOLE[4:]])
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    assert read(data) is Refusal.INVALID


def test_another_geometry_is_refused() -> None:
    assert read(WHOLE, geometry="other") is Refusal.INVALID


def test_trailing_bytes_are_ignored() -> None:
    assert read(WHOLE + b"x") == Loaded(TOKENS, len(WHOLE))


def test_a_longer_snapshot_keeps_the_bytes_of_its_prefix() -> None:
    longer = encode([*TOKENS, 73], geometry="g", bytes_per_token=64)
    assert WHOLE[-4 * 64 :] in longer
