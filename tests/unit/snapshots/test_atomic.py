from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvproxy.snapshots import atomic
from kvproxy.snapshots.atomic import remove_durably, sync_directory, write_atomic
from tests.unit.snapshots.steps import STEPS, Crash, crash_at, fail_at


def test_the_steps_of_a_write_come_in_their_order(tmp_path: Path) -> None:
    seen: list[str] = []

    write_atomic(tmp_path / "a", b"new", observe=seen.append)

    assert (seen, (tmp_path / "a").read_bytes(), os.listdir(tmp_path)) == (STEPS, b"new", ["a"])


def test_what_is_written_is_private(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"new")

    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_the_file_is_synced_before_the_rename_and_its_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        calls.append("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", recorded)
    write_atomic(tmp_path / "a", b"new", observe=calls.append)

    assert calls == ["opened", "written", "file", "synced", "renamed", "directory", "settled"]


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_the_old_content_or_the_new(tmp_path: Path, step: str) -> None:
    (tmp_path / "a").write_bytes(b"old")

    with pytest.raises(Crash):
        write_atomic(tmp_path / "a", b"new", observe=crash_at(step))

    expected = b"new" if step in ("renamed", "settled") else b"old"
    assert (tmp_path / "a").read_bytes() == expected


@pytest.mark.parametrize("step", STEPS)
def test_an_error_at_any_step_leaves_no_temp_file(tmp_path: Path, step: str) -> None:
    (tmp_path / "a").write_bytes(b"old")

    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "a", b"new", observe=fail_at(step))

    assert os.listdir(tmp_path) == ["a"]


def test_a_name_that_is_taken_by_a_directory_is_an_error_and_leaves_no_temp_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "a", b"new")

    assert os.listdir(tmp_path) == ["a"]


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    remove_durably(tmp_path / "a")
    remove_durably(tmp_path / "a")

    assert os.listdir(tmp_path) == []


def refuse_sync(code: int) -> Callable[[int], None]:
    def fsync(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    return fsync


def test_a_file_system_that_cannot_sync_directories_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic.os, "fsync", refuse_sync(errno.EINVAL))

    sync_directory(tmp_path)


def test_a_directory_that_fails_to_sync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.os, "fsync", refuse_sync(errno.EIO))

    with pytest.raises(OSError, match="Input/output"):
        sync_directory(tmp_path)
