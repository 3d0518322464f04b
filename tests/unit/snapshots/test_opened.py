from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvproxy.snapshots.opened import open_regular


def test_a_regular_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")

    with open_regular(tmp_path / "a") as file:
        assert file.read() == b"abc"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("a")

    with pytest.raises(OSError, match="symbolic links"):
        open_regular(tmp_path / "link")


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")


def test_a_refused_file_is_closed_again(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(5):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path)

    assert len(os.listdir("/proc/self/fd")) == before
