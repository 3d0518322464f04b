from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvproxy.snapshots.access import SNAPSHOT_DIR, STATE_DIR, trouble_with, why_unusable

NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """As somebody to whom permissions apply."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if before == 0:
            os.seteuid(before)


@pytest.fixture
def below(tmp_path: Path) -> Iterator[Path]:
    """A directory that everybody can get to."""
    ours = [folder for folder in (tmp_path, *tmp_path.parents) if "pytest" in str(folder)]
    modes = [(folder, folder.stat().st_mode) for folder in ours]
    for folder in ours:
        folder.chmod(0o755)
    yield tmp_path
    for folder, mode in modes:
        folder.chmod(mode)


def test_one_that_can_be_used_has_no_trouble(tmp_path: Path) -> None:
    assert why_unusable(tmp_path, STATE_DIR) == ""


@pytest.mark.parametrize("otherwise", [STATE_DIR, SNAPSHOT_DIR])
def test_a_file_in_its_place_is_to_be_moved_away(tmp_path: Path, otherwise: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path in (file, file / "below"):
        told = f"{file}: Not a directory; move that file away, or {otherwise}"
        assert why_unusable(path, otherwise) == told


def test_one_that_is_not_there_is_to_be_created(tmp_path: Path) -> None:
    path = tmp_path / "absent"
    told = f"{path}: No such file or directory; create it or bring it back, or {SNAPSHOT_DIR}"
    assert why_unusable(path, SNAPSHOT_DIR) == told


@pytest.mark.parametrize("mode", [0o000, 0o555, 0o333], ids=["neither", "not written", "not read"])
def test_one_that_we_may_not_read_and_write_is_a_matter_of_permission(below: Path, mode: int) -> None:
    path = below / "shut"
    path.mkdir()
    path.chmod(mode)
    with unprivileged():
        told = why_unusable(path, STATE_DIR)
    path.chmod(0o755)
    assert told == f"{path}: Permission denied; let kvproxy's user read and write it, or {STATE_DIR}"


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.EROFS, "mount it writable"),
        (errno.ENOSPC, "make room on its disk"),
        (errno.EACCES, "let kvproxy's user read and write it"),
        (errno.EIO, "see what is wrong with it"),
    ],
)
def test_each_trouble_has_its_own_mend(tmp_path: Path, number: int, mend: str) -> None:
    error = OSError(number, os.strerror(number))
    told = f"{tmp_path}: {os.strerror(number)}; {mend}, or {STATE_DIR}"
    assert trouble_with(tmp_path, error, STATE_DIR) == told
