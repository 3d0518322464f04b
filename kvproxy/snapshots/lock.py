"""One process per state directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from kvproxy.errors import StateDirError, StateDirTaken
from kvproxy.snapshots.access import STATE_DIR, trouble_with, why_unusable

_PID_BYTES = 32


class StateLock:
    """An exclusive lock on `<state_dir>/lock`, with our process id inside. It ends with the process.

    The file is never removed: whoever removes a lock file lets two others hold "the" lock, each its own.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, state_dir: Path) -> StateLock:
        """StateDirTaken if another process holds it, StateDirError if it cannot be used. Blocks briefly."""
        path = state_dir / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            trouble = why_unusable(state_dir, STATE_DIR) or trouble_with(path, error, STATE_DIR)
            raise StateDirError(f"cannot lock state directory {trouble}") from error
        try:
            _lock(descriptor, state_dir)
        except BaseException:
            os.close(descriptor)
            raise
        _write_pid(descriptor)
        return cls(descriptor)

    def stands(self, state_dir: Path) -> bool:
        """Whether what was locked is still there, in its place."""
        if self._descriptor is None:
            return False
        try:
            held, found = os.fstat(self._descriptor), os.stat(state_dir / "lock")
        except OSError:
            return False
        return (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino)

    def release(self) -> None:
        """May be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> StateLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _lock(descriptor: int, state_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.pread(descriptor, _PID_BYTES, 0).decode("ascii", "replace").strip() or "unknown"
        raise StateDirTaken(
            f"state directory {state_dir} is in use by process {pid}; "
            "stop it, or give this one its own state_dir"
        ) from error
    except OSError as error:
        raise StateDirError(
            f"cannot lock state directory {state_dir}: {error.strerror}; "
            "set state_dir to a file system that has locks"
        ) from error


def _write_pid(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
    except OSError:
        # A full disk: the lock holds without it, the pid only makes the other's error friendlier.
        pass
