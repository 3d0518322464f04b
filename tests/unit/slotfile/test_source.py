from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproxy.slotfile import source as source_module
from kvproxy.slotfile.source import Source, Unlike


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    path = tmp_path / "numbers"
    path.write_bytes(bytes.fromhex("01000000 feffffff 03000000 00000000 ff"))
    with path.open("rb", buffering=0) as file:
        yield Source(file)


def test_numbers_are_little_endian(source: Source) -> None:
    assert source.integers(0, 3).tolist() == [1, -2, 3]
    assert source.unpack("<iQ", 4) == (-2, 3)


def test_the_last_byte_can_be_read_and_the_one_behind_it_not(source: Source) -> None:
    assert source.read(16, 1) == b"\xff"
    assert source.after(0, 17) == 17
    for at, count in ((16, 2), (17, 1), (0, 1 << 70)):
        with pytest.raises(Unlike):
            source.read(at, count)
        with pytest.raises(Unlike):
            source.after(at, count)


def test_a_file_that_was_shortened_meanwhile_is_unlike_anything(tmp_path: Path) -> None:
    path = tmp_path / "shrinking"
    path.write_bytes(bytes(8))
    with path.open("r+b", buffering=0) as file:
        source = Source(file)
        file.truncate(4)
        with pytest.raises(Unlike):
            source.read(0, 8)


@pytest.mark.parametrize("account", ["MOST_READS", "MOST_BYTES"])
def test_a_spent_account_ends_every_further_read(
    account: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, account, 3)
    path = tmp_path / "long"
    path.write_bytes(bytes(8))
    with path.open("rb", buffering=0) as file:
        source = Source(file)
        source.read(0, 1)
        source.read(0, 1)
        assert not source.is_spent
        for _ in range(2):
            with pytest.raises(Unlike):
                source.read(0, 1)
        assert source.is_spent
