"""The state directory on disk: manifests, marks of restores in flight, quarantine. All of it blocks.

lock                     who uses it
owner                    8 hex digits, made once: the mark of this directory's snapshot files
canaries.json            which servers computed what (see `canaries`)
manifests/<key>-<fp>.json
restoring/<name>         empty; there while the server restores that snapshot
quarantine/              manifests that could not be read
living-<server>.json     what lives in slots now; kept by `upstream.living`
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvproxy.errors import StateDirError
from kvproxy.identifiers import Owner, SnapshotName
from kvproxy.snapshots.access import STATE_DIR, trouble_with, why_unusable
from kvproxy.snapshots.atomic import (
    TEMP_SUFFIX,
    Observe,
    remove_durably,
    unobserved,
    write_atomic,
)
from kvproxy.snapshots.lock import StateLock
from kvproxy.snapshots.manifest import Manifest, Unreadable, decode, encode
from kvproxy.snapshots.names import is_ours, is_owner, new_owner

MAX_MANIFEST_BYTES = 65_536
MAX_OWNER_BYTES = 64


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was found. `complaints` are sentences for the operator, one per file that was put aside;
    `owner_failure` says why the owner made now will not be known in the next life."""

    manifests: tuple[Manifest, ...]
    restoring: tuple[SnapshotName, ...]
    complaints: tuple[str, ...]
    owner: Owner
    owner_failure: str | None = None


def file_name(manifest: Manifest) -> str:
    return f"{manifest.key}-{manifest.fingerprint.digest}.json"


class StateDir:
    """`observe` is told each step of a write (see `write_atomic`), so that a test can stop there."""

    def __init__(self, path: Path, *, observe: Observe = unobserved) -> None:
        self.path = path
        self._manifests = path / "manifests"
        self._restoring = path / "restoring"
        self._quarantine = path / "quarantine"
        self._owner = path / "owner"
        self._observe = observe

    def prepare(self) -> None:
        """Make the directories, private. StateDirError if that cannot be done."""
        for directory in (self.path, self._manifests, self._restoring, self._quarantine):
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                trouble = trouble_with(directory, error, STATE_DIR)
                raise StateDirError(f"cannot create state directory {self.path}: {trouble}") from error

    def why_unusable(self, lock: StateLock | None) -> str:
        """What a look shows to be wrong with it; empty if nothing. `lock` is ours on it."""
        if lock is not None and not lock.stands(self.path):
            return f"state directory {self.path} is gone or another one: bring it back, or restart kvproxy"
        for directory in (self.path, self._manifests, self._restoring):
            if fault := why_unusable(directory, STATE_DIR):
                return f"cannot use state directory {self.path}: {fault}"
        return ""

    def load(self) -> Loaded:
        """Read all manifests, put aside what is none, remove temp files. StateDirError if not readable."""
        try:
            paths = sorted(self._manifests.iterdir())
            marks = sorted(os.listdir(self._restoring))
        except OSError as error:
            trouble = trouble_with(Path(error.filename), error, STATE_DIR)
            raise StateDirError(f"cannot read state directory {self.path}: {trouble}") from error
        manifests: list[Manifest] = []
        complaints: list[str] = []
        for path in paths:
            if path.name.endswith(TEMP_SUFFIX):
                _remove_leftover(path)
                continue
            found = _read(path)
            if isinstance(found, Manifest):
                manifests.append(found)
            else:
                complaints.append(self._put_aside(path, found.reason))
        owner, owner_failure = self._own()
        restoring = tuple(SnapshotName(mark) for mark in marks if is_ours(mark))
        return Loaded(tuple(manifests), restoring, tuple(complaints), owner, owner_failure)

    def _own(self) -> tuple[Owner, str | None]:
        """An owner for this life at least: on a full disk nothing else can be written either."""
        if (known := _read_owner(self._owner)) is not None:
            return known, None
        owner = new_owner()
        try:
            write_atomic(self._owner, f"{owner}\n".encode("ascii"))
        except OSError as error:
            return owner, f"cannot write {self._owner}: {error.strerror or error}"
        return owner, None

    def _put_aside(self, path: Path, reason: str) -> str:
        try:
            os.replace(path, self._quarantine / path.name)
        except OSError as error:
            return f"manifest {path} is ignored ({reason}) and cannot be moved: {error.strerror}"
        return f"manifest {path.name} was moved to {self._quarantine}: {reason}"

    def write(self, manifest: Manifest) -> str | None:
        """None once it stands, else the reason why the old one does."""
        path, data = self._manifests / file_name(manifest), encode(manifest)
        try:
            write_atomic(path, data, observe=self._observe)
        except OSError as error:
            # An error after the rename changes nothing about what a reader finds.
            return None if _holds(path, data) else f"cannot write {path}: {error.strerror or error}"
        return None

    def remove(self, manifest: Manifest) -> str | None:
        """None once it is gone, else the reason why not."""
        path = self._manifests / file_name(manifest)
        try:
            remove_durably(path)
        except OSError as error:
            return f"cannot remove {path}: {error.strerror or error}" if path.exists() else None
        return None

    def mark_restoring(self, name: SnapshotName) -> str | None:
        # Not synced: the mark outlives a process, and a machine that dies restores nothing.
        try:
            (self._restoring / name).touch(mode=0o600)
        except OSError as error:
            return f"cannot mark {name} as being restored: {error.strerror}"
        return None

    def clear_restoring(self, name: SnapshotName) -> str | None:
        try:
            (self._restoring / name).unlink(missing_ok=True)
        except OSError as error:
            return f"cannot clear the restore mark of {name}: {error.strerror}"
        return None


def _read(path: Path) -> Manifest | Unreadable:
    try:
        if not path.is_file() or path.is_symlink():
            return Unreadable("not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        return Unreadable(f"cannot be read: {error.strerror}")
    if len(data) > MAX_MANIFEST_BYTES:
        return Unreadable(f"larger than {MAX_MANIFEST_BYTES} bytes")
    found = decode(data)
    if isinstance(found, Manifest) and file_name(found) != path.name:
        return Unreadable(f"its name should be {file_name(found)}")
    return found


def _read_owner(path: Path) -> Owner | None:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_OWNER_BYTES).decode("ascii", "replace").strip()
    except OSError:
        # There is none yet, or it is of no use: a new one is made, and its write tells what is wrong.
        return None
    return Owner(text) if is_owner(text) else None


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        # What cannot be read back does not stand; the first error is the one worth telling.
        return False


def _remove_leftover(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        # It is ignored by its name, whether it can be removed or not.
        pass
