from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.slotfile.head import HEAD_BYTES, Head, parse_head, read_head
from tests.unit.snapshots.samples import packed_file, plain_file, words

EMPTY_SLOT = bytes.fromhex(
    "71736767 04000000 04000000 ffffffff 01000000 00000000 00000000 02000000 0000000000000000"
)
"""What b11434 writes for an empty slot of a full-attention model."""
B11434 = bytes.fromhex("71736767 04000000 20000000 ffffffff 01000000 1c000000")
"""The head of a 28-token slot as b11434 wrote it."""


def test_a_head_as_the_server_wrote_it_tells_its_tokens() -> None:
    assert parse_head(B11434) == Head(version=4, tokens=28, token_block_end=140)


def test_an_empty_slot_holds_no_tokens() -> None:
    assert parse_head(EMPTY_SLOT[:HEAD_BYTES]) == Head(version=4, tokens=0, token_block_end=28)


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("make", [packed_file, plain_file])
def test_both_layouts_are_read_in_every_version(make: object, version: int) -> None:
    data = make([5, 6, 7], version=version)  # type: ignore[operator]

    head = parse_head(data[:HEAD_BYTES])

    assert head is not None
    assert (head.version, head.tokens) == (version, 3)
    assert data[head.token_block_end :] == b"kv" * 50


def test_media_in_the_token_block_does_not_change_the_count() -> None:
    block = words(-1, 1, 2, 8, 9, 1, 0, 4, 1234)

    head = parse_head(b"qsgg" + words(4, len(block) // 4) + block)

    assert head is not None
    assert (head.tokens, head.token_block_end) == (2, 12 + len(block))


def test_a_plain_block_without_tokens_holds_none() -> None:
    assert parse_head(plain_file([], state=b"")) == Head(version=2, tokens=0, token_block_end=12)


def test_a_format_newer_than_ours_is_a_slot_file_whose_tokens_are_not_known() -> None:
    head = parse_head(packed_file([1], version=5))

    assert head is not None
    assert (head.version, head.tokens) == (5, None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"qsgg",
        b"ggsq" + packed_file([1])[4:],
        packed_file([1], version=1),
        packed_file([1], version=0),
        b"qsgg" + words(4, 8, -1, 2, 4),
        b"qsgg" + words(4, 8, -1, 1, 5),
        b"qsgg" + words(4, 8, -1, 1, -1),
        b"qsgg" + words(4, 8),
        b"qsgg" + words(4, 8, -1),
        packed_file([1, 2])[:23],
    ],
)
def test_what_is_no_slot_file_has_no_head(data: bytes) -> None:
    assert parse_head(data[:HEAD_BYTES]) is None


@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda rest: b"qsgg" + rest))
def test_no_bytes_make_the_parser_raise(data: bytes) -> None:
    head = parse_head(data)

    assert head is None or head.version >= 2


def test_the_head_of_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(packed_file([1, 2]))

    head = read_head(tmp_path / "a")

    assert head is not None
    assert head.tokens == 2


def test_what_cannot_be_opened_as_a_file_has_no_head(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(packed_file([1]))
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")

    found = {name: read_head(tmp_path / name) for name in ("link", "directory", "pipe", "absent")}

    assert found == dict.fromkeys(found)
