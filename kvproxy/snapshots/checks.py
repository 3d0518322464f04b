"""Is this file the snapshot it is said to be? All of it blocks; OSErrors become reasons.

The server counts what it wrote before it closes the file, so on a full disk it reports success for a short
one, and a file that is short by a byte or two aborts the server that restores it. Hence the distrust.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from kvproxy.identifiers import SnapshotName
from kvproxy.slotfile.head import HEAD_BYTES, parse_head
from kvproxy.snapshots.access import SNAPSHOT_DIR, why_unusable
from kvproxy.snapshots.atomic import sync_directory
from kvproxy.snapshots.manifest import FileIdentity, Generation
from kvproxy.snapshots.opened import open_regular
from kvproxy.upstream.replies import Saved


@dataclass(frozen=True, slots=True)
class FileCheck:
    """`reason` says what is wrong and is empty if nothing is; `identity` is what was seen, if anything."""

    reason: str = ""
    identity: FileIdentity | None = None
    is_out_of_sight: bool = False
    """It is the directory that is not there: whether anything is wrong with the file is not known."""

    @property
    def is_ok(self) -> bool:
        return not self.reason


def check_saved(path: Path, saved: Saved) -> FileCheck:
    """Compare a fresh file with the server's claim."""
    if saved.tokens < 1:
        return FileCheck("the server saved no tokens")
    try:
        with open_regular(path) as file:
            reason = _differs(file, tokens=saved.tokens, size_bytes=saved.size_bytes)
            return FileCheck(reason, None if reason else identity_of(file.fileno()))
    except OSError as error:
        return FileCheck(_describe(error))


def make_durable(path: Path) -> FileCheck:
    """Make a file private, and sync it and its directory; its identity from then on."""
    try:
        with open_regular(path) as file:
            _make_private(file.fileno())
            os.fsync(file.fileno())
            sync_directory(path.parent)
            # Only now: the change of mode moved ctime.
            return FileCheck(identity=identity_of(file.fileno()))
    except OSError as error:
        return FileCheck(_describe(error))


def check_stored(path: Path, generation: Generation) -> FileCheck:
    """Compare a file with what was published; read it whole only if it is not evidently the same one."""
    try:
        with open_regular(path) as file:
            identity = identity_of(file.fileno())
            if identity == generation.identity:
                return FileCheck(identity=identity)
            return _check_moved(file, generation, identity)
    except OSError as error:
        absence = why_unusable(path.parent, SNAPSHOT_DIR) or _elsewhere(path.parent, generation)
        return FileCheck(absence or _describe(error), is_out_of_sight=bool(absence))


def _check_moved(file: FileIO, generation: Generation, identity: FileIdentity) -> FileCheck:
    if reason := _differs(file, tokens=generation.tokens, size_bytes=generation.size_bytes):
        return FileCheck(reason)
    if generation.sha256 is None:
        # Never seen before (it was published while the directory was out of sight) is no change.
        is_new = generation.identity is None
        return FileCheck(identity=identity) if is_new else FileCheck("file changed and no digest is known")
    if _sha256(file) != generation.sha256:
        return FileCheck("file content changed: the digest differs")
    if identity_of(file.fileno()) != identity:
        return FileCheck("file changed while it was read")
    return FileCheck(identity=identity)


def digest_of(path: Path, identity: FileIdentity | None) -> str | None:
    """SHA-256 in hex; None if it cannot be read, or was not the file of `identity` from first to last."""
    try:
        with open_regular(path) as file:
            before = identity_of(file.fileno())
            if identity is not None and before != identity:
                return None
            digest = _sha256(file)
            return digest if identity_of(file.fileno()) == before else None
    except OSError:
        # Without a digest the snapshot is still good for as long as its identity stands.
        return None


@dataclass(frozen=True, slots=True)
class Sight:
    """What a look at a directory shows, without reading: `fault` is why it cannot be used, empty if it can;
    `wrong` says of each file that is not what was published what is wrong with it."""

    fault: str = ""
    wrong: Mapping[SnapshotName, str] = field(default_factory=dict)


def at_sight(directory: Path, generations: Collection[Generation]) -> Sight:
    """Says nothing of files that lie in another file system than is there now."""
    if fault := why_unusable(directory, SNAPSHOT_DIR):
        return Sight(fault)
    looked = {
        one.name: _wrong_at_sight(directory / one.name, one)
        for one in generations
        if not _elsewhere(directory, one)
    }
    return Sight("", {name: reason for name, reason in looked.items() if reason})


def _elsewhere(directory: Path, generation: Generation) -> str:
    """That a directory is not the one in which a file was published; empty if it is."""
    try:
        device = os.stat(directory).st_dev
    except OSError as error:
        return f"{directory}: {error.strerror}"
    is_there = generation.identity is None or generation.identity.device == device
    return "" if is_there else f"{directory}: another file system is there now"


def _wrong_at_sight(path: Path, generation: Generation) -> str:
    try:
        seen = os.lstat(path)
    except FileNotFoundError as error:
        return _describe(error)
    except OSError:
        # It may well be there: what is wrong is told by those who open it.
        return ""
    if not stat.S_ISREG(seen.st_mode):
        return "not a regular file"
    is_whole = seen.st_size == generation.size_bytes
    return "" if is_whole else f"file is {seen.st_size} bytes instead of {generation.size_bytes}"


def identity_of(descriptor: int) -> FileIdentity:
    seen = os.fstat(descriptor)
    return FileIdentity(
        device=seen.st_dev,
        inode=seen.st_ino,
        size=seen.st_size,
        mtime_ns=seen.st_mtime_ns,
        ctime_ns=seen.st_ctime_ns,
    )


def _differs(file: FileIO, *, tokens: int, size_bytes: int) -> str:
    size = os.fstat(file.fileno()).st_size
    if size != size_bytes:
        return f"file is {size} bytes instead of {size_bytes}"
    head = parse_head(file.read(HEAD_BYTES))
    if head is None:
        return "file does not begin like a slot file"
    if head.tokens is not None and head.tokens != tokens:
        return f"file holds {head.tokens} tokens instead of {tokens}"
    if size <= head.token_block_end:
        return "file ends before its KV state begins"
    return ""


def _sha256(file: FileIO) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def _make_private(descriptor: int) -> None:
    try:
        os.fchmod(descriptor, 0o600)
    except PermissionError:
        # The server runs as another user: the file is that user's to protect, and still ours to read.
        pass


def _describe(error: OSError) -> str:
    return (
        "file is missing" if isinstance(error, FileNotFoundError) else f"cannot read file: {error.strerror}"
    )
