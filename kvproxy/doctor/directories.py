"""The two directories, as kvproxy would find them at start. All of it blocks; OSErrors become reasons."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvproxy.doctor.check import Change, Check, passed, unusable
from kvproxy.errors import StateDirError
from kvproxy.snapshots.access import STATE_DIR, trouble_with, why_unusable
from kvproxy.snapshots.lock import StateLock

STATE_DIRECTORY = "state directory"

OTHER_STATE_DIR = Change(
    "state_dir: DIR", "nothing is saved without a state directory that kvproxy can write"
)


def check_state_dir(path: Path) -> Check:
    """Usable and lockable? Creates nothing that stays but the lock file of a directory that is there."""
    try:
        if not path.exists():
            return _check_absent(path)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"kvproxy")
            file.flush()
    except OSError as error:
        return unusable(STATE_DIRECTORY, trouble_with(path, error, STATE_DIR), OTHER_STATE_DIR)
    return _check_lock(path)


def _check_absent(path: Path) -> Check:
    parent = next(folder for folder in path.parents if folder.exists())
    if fault := why_unusable(parent, STATE_DIR):
        return unusable(STATE_DIRECTORY, f"{path} cannot be made: {fault}", OTHER_STATE_DIR)
    return passed(STATE_DIRECTORY, f"{path} will be made at the first start")


def _check_lock(path: Path) -> Check:
    try:
        with StateLock.acquire(path):
            return passed(STATE_DIRECTORY, f"{path} is usable and free")
    except StateDirError as error:
        if isinstance(error.__cause__, BlockingIOError):
            # A daemon at work is no fault; its own lock is what tells us of it.
            return passed(STATE_DIRECTORY, f"{path} is usable and held by a running kvproxy")
        return unusable(STATE_DIRECTORY, str(error), OTHER_STATE_DIR)
