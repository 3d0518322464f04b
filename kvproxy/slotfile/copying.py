"""Moving bytes from one file to another without holding them: cloned where the file system can."""

from __future__ import annotations

import errno
import os
from pathlib import Path

CHUNK_BYTES = 1 << 20

_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF})
"""What file systems and kernels say that do not copy between two files by themselves."""


def create_like(path: Path, source: int) -> int:
    """A descriptor of a new file that its owner alone may read: the owner of `source`, who is the server.

    Blocks; OSError if something is there, or if we may not give files away to that owner.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        owner = os.fstat(source)
        if owner.st_uid != os.fstat(descriptor).st_uid:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return descriptor


def transfer(source: int, at: int, count: int, target: int) -> None:
    """Append `count` bytes of `source` from `at` on to `target`, at its own place. Blocks.

    The kernel shares the blocks of both files where the file system can (btrfs, XFS), and copies them
    otherwise. OSError if that cannot be done, or if `source` ends before.
    """
    left = _in_kernel(source, at, count, target)
    at += count - left
    while left:
        data = os.pread(source, min(left, CHUNK_BYTES), at)
        if not data:
            raise OSError(errno.EIO, "the file ended before its time")
        append(target, data)
        at += len(data)
        left -= len(data)


def _in_kernel(source: int, at: int, count: int, target: int) -> int:
    """How many bytes are left to be copied otherwise."""
    copy = getattr(os, "copy_file_range", None)
    left = count
    while copy is not None and left:
        try:
            moved = copy(source, target, left, offset_src=at)
        except OSError as error:
            if error.errno in _NO_KERNEL_COPY:
                break
            raise
        if not moved:
            break
        at += moved
        left -= moved
    return left


def append(target: int, data: bytes) -> None:
    """Write all of `data`. Blocks; OSError if the disk is full."""
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
