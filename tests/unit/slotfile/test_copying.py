from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproxy.slotfile import copying
from kvproxy.slotfile.copying import append, create_like, transfer

DATA = bytes(range(256)) * 20


@pytest.fixture
def source(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def refuses(number: int) -> Any:
    def copy(*args: object, **more: object) -> int:
        raise OSError(number, os.strerror(number))

    return copy


def moves_little(source: int, target: int, count: int, *, offset_src: int) -> int:
    return os.write(target, os.pread(source, min(count, 7), offset_src))


KERNELS = {
    "as it is here": None,
    "copies in small pieces": moves_little,
    "cannot on this file system": refuses(errno.EOPNOTSUPP),
    "cannot between two of them": refuses(errno.EXDEV),
    "says nothing and moves nothing": lambda *args, **more: 0,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bytes_arrive_whatever_the_kernel_can(
    kernel: str, source: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if KERNELS[kernel] is not None:
        monkeypatch.setattr(copying.os, "copy_file_range", KERNELS[kernel])
    monkeypatch.setattr(copying, "CHUNK_BYTES", 100)
    target = create_like(tmp_path / "target", source)

    append(target, b"head")
    transfer(source, 1000, 2345, target)
    append(target, b"tail")
    os.close(target)

    assert (tmp_path / "target").read_bytes() == b"head" + DATA[1000:3345] + b"tail"


def test_a_full_disk_is_an_error(source: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying.os, "copy_file_range", refuses(errno.ENOSPC))
    target = create_like(tmp_path / "target", source)

    with pytest.raises(OSError, match="No space left"):
        transfer(source, 0, 10, target)

    os.close(target)


def test_a_source_that_ends_too_early_is_an_error(source: int, tmp_path: Path) -> None:
    target = create_like(tmp_path / "target", source)

    with pytest.raises(OSError, match="ended before its time"):
        transfer(source, 0, len(DATA) + 1, target)

    os.close(target)


def test_the_new_file_is_private_and_takes_no_place_that_is_taken(source: int, tmp_path: Path) -> None:
    os.close(create_like(tmp_path / "target", source))
    (tmp_path / "link").symlink_to("elsewhere")

    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o600
    for name in ("target", "link"):
        with pytest.raises(FileExistsError):
            create_like(tmp_path / name, source)
    assert not (tmp_path / "elsewhere").exists()


def test_the_new_file_belongs_to_the_owner_of_the_old_one(
    source: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has to read it, and may run as another user."""
    given: list[tuple[int, int]] = []
    fstat = os.fstat

    def seen(descriptor: int) -> Any:
        found = list(fstat(descriptor))
        if descriptor == source:
            found[4:6] = [4321, 1234]
        return os.stat_result(found)

    monkeypatch.setattr(copying.os, "fstat", seen)
    monkeypatch.setattr(copying.os, "fchown", lambda _, user, group: given.append((user, group)))

    os.close(create_like(tmp_path / "target", source))

    assert given == [(4321, 1234)]


def test_no_file_is_left_where_it_may_not_be_given_away(
    source: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fstat = os.fstat
    other = os.stat_result([0] * 4 + [4321, 1234] + [0] * 4)
    monkeypatch.setattr(copying.os, "fstat", lambda at: other if at == source else fstat(at))
    monkeypatch.setattr(copying.os, "fchown", refuses(errno.EPERM))

    with pytest.raises(PermissionError):
        create_like(tmp_path / "target", source)

    assert not (tmp_path / "target").exists()
