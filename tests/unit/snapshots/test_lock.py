from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvproxy.errors import StateDirError, StateDirTaken
from kvproxy.snapshots import lock as module
from kvproxy.snapshots.lock import StateLock

HOLD = """
import sys
from pathlib import Path
from kvproxy.snapshots.lock import StateLock
lock = StateLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_tells_who_holds_it(tmp_path: Path) -> None:
    with StateLock.acquire(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_second_process_is_told_the_first_ones_pid_and_the_mend(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"

        with pytest.raises(StateDirError) as caught:
            StateLock.acquire(tmp_path)

        holder.kill()
    assert f"process {holder.pid};" in str(caught.value)
    assert "state_dir" in str(caught.value)
    # The lock ends with its holder, however that ended.
    StateLock.acquire(tmp_path).release()


def test_a_shorter_pid_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("123456789012\n")

    with StateLock.acquire(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_released_lock_is_free_and_releasing_it_again_is_harmless(tmp_path: Path) -> None:
    first = StateLock.acquire(tmp_path)
    first.release()
    with StateLock.acquire(tmp_path):
        first.release()

        with pytest.raises(StateDirError):
            StateLock.acquire(tmp_path)


def test_a_refused_lock_leaves_no_file_open(tmp_path: Path) -> None:
    with StateLock.acquire(tmp_path):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(StateDirError):
                StateLock.acquire(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_that_is_not_there_is_named_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(StateDirError, match=r"absent: No such file or directory; create it .* state_dir"):
        StateLock.acquire(tmp_path / "absent")


def test_a_file_system_without_locks_is_named_with_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module.fcntl, "flock", refuse)

    with pytest.raises(StateDirError, match=r"Operation not supported; .* state_dir"):
        StateLock.acquire(tmp_path)


def test_a_full_disk_does_not_keep_us_from_locking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "pwrite", refuse)

    with StateLock.acquire(tmp_path), pytest.raises(StateDirTaken, match="process unknown"):
        StateLock.acquire(tmp_path)
