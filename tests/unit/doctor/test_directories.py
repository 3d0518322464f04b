from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.doctor import directories
from kvproxy.doctor.check import Result
from kvproxy.doctor.directories import OTHER_STATE_DIR, check_state_dir
from kvproxy.errors import StateDirError
from kvproxy.snapshots.lock import StateLock


def test_a_directory_that_is_there_is_usable_and_left_free(tmp_path: Path) -> None:
    check = check_state_dir(tmp_path)
    assert (check.result, check.detail) == (Result.OK, f"{tmp_path} is usable and free")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    StateLock.acquire(tmp_path).release()


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert check_state_dir(tmp_path / "a" / "b").result is Result.OK
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_a_kvproxy_holds_is_no_fault(tmp_path: Path) -> None:
    with StateLock.acquire(tmp_path):
        check = check_state_dir(tmp_path)
    assert check.result is Result.OK
    assert "held by a running kvproxy" in check.detail


def test_a_file_in_its_place_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        check = check_state_dir(path)
        assert (check.result, check.changes) == (Result.UNUSABLE, (OTHER_STATE_DIR,))


def test_a_path_that_cannot_even_be_looked_at_is_unusable(tmp_path: Path) -> None:
    for path in (tmp_path / ("a" * 300), tmp_path / ("a" * 300) / "below"):
        check = check_state_dir(path)
        assert (check.result, check.changes) == (Result.UNUSABLE, (OTHER_STATE_DIR,))
        assert "too long" in check.detail


def test_a_directory_that_cannot_be_locked_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        @staticmethod
        def acquire(path: Path) -> StateLock:
            raise StateDirError("no locks here") from OSError()

    monkeypatch.setattr(directories, "StateLock", Broken)
    check = check_state_dir(tmp_path)
    assert (check.result, check.detail) == (Result.UNUSABLE, "no locks here")
