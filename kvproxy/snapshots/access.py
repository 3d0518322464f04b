"""Why a directory cannot be used, and what mends that: `PATH: cause; mend`, the same wherever it is told; and
how much room it has.

All of it blocks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

STATE_DIR = "set state_dir to another directory"
SNAPSHOT_DIR = "set upstreams[].snapshot_dir to the server's --slot-save-path"
"""What may be done instead."""

_PERMISSION = "let kvproxy's user read and write it"
_MENDS: Mapping[int | None, str] = {
    errno.ENOENT: "create it or bring it back",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "mount it writable",
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room on its disk",
}


def why_unusable(directory: Path, otherwise: str) -> str:
    """Why it cannot be read and written, by its looks; empty if it can."""
    try:
        os.stat(directory)
    except OSError as error:
        return trouble_with(directory, error, otherwise)
    if not directory.is_dir():
        return trouble_with(directory, _error(errno.ENOTDIR), otherwise)
    is_effective = os.access in os.supports_effective_ids
    if os.access(directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=is_effective):
        return ""
    number = errno.EROFS if os.statvfs(directory).f_flag & os.ST_RDONLY else errno.EACCES
    return trouble_with(directory, _error(number), otherwise)


def trouble_with(directory: Path, error: OSError, otherwise: str) -> str:
    """What the system said of a directory, with the mend for it or `otherwise`."""
    if (file := _file_in_the_way(directory)) is not None:
        return f"{file}: {os.strerror(errno.ENOTDIR)}; move that file away, or {otherwise}"
    mend = _MENDS.get(error.errno, "see what is wrong with it")
    return f"{directory}: {error.strerror or error}; {mend}, or {otherwise}"


def free_bytes(directory: Path) -> int | None:
    """Room for more; None if not known."""
    try:
        seen = os.statvfs(directory)
    except OSError:
        # Not knowing is an answer here: the caller then does without the check.
        return None
    return seen.f_bavail * seen.f_frsize


def _file_in_the_way(directory: Path) -> Path | None:
    """What stands where a directory should, on the way there or at its end."""
    try:
        found = next((path for path in (directory, *directory.parents) if os.path.lexists(path)), None)
        return None if found is None or found.is_dir() else found
    except OSError:
        # Not to be looked at: then the first error is what there is to tell.
        return None


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
