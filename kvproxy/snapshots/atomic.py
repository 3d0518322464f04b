"""Replacing a small file so that a crash at any moment leaves the old content or the new, never half."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path

TEMP_SUFFIX = ".tmp"

Observe = Callable[[str], None]
"""Called after each step with its name: `opened`, `written`, `synced`, `renamed`, `settled`."""

_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})


def unobserved(step: str) -> None:
    pass


def write_atomic(path: Path, data: bytes, *, observe: Observe = unobserved) -> None:
    """Write `path` with mode 0600. Blocks; OSError if it cannot, and then no temp file is left.

    After an error in the very last step the new content stands all the same.
    """
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMP_SUFFIX}")
    try:
        _write_synced(temp, data, observe)
        os.replace(temp, path)
        observe("renamed")
    except Exception:  # whatever it was, it goes on up; a half-written file must not stay
        temp.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    observe("settled")


def _write_synced(temp: Path, data: bytes, observe: Observe) -> None:
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        observe("opened")
        file.write(data)
        file.flush()
        observe("written")
        os.fsync(file.fileno())
        observe("synced")


def remove_durably(path: Path) -> None:
    """Remove `path` if it is there. Blocks; OSError if it cannot."""
    path.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and removals in a directory last. Blocks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot, and there is nothing else to call there.
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)
