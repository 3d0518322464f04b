"""The snapshot files themselves, in the two ways we may stand to them.

`ServerOwnedFiles`: the server's save directory is not ours to see, we know names only.
`SharedDirectory`: we see the directory, and so may check, hash, list and delete.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from kvproxy.identifiers import Owner, SnapshotName
from kvproxy.slotfile.layout import Layout, read_layout, read_token_ids
from kvproxy.slotfile.prefix import Prefix, Uncut, cut_prefix
from kvproxy.slotfile.window import Closed, open_window
from kvproxy.snapshots.access import SNAPSHOT_DIR, free_bytes, trouble_with
from kvproxy.snapshots.checks import (
    FileCheck,
    Sight,
    at_sight,
    check_saved,
    check_stored,
    digest_of,
    make_durable,
)
from kvproxy.snapshots.manifest import FileIdentity, Generation, digest_of_ids
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.names import is_of, is_ours
from kvproxy.token_ids import shared_length
from kvproxy.upstream.replies import Saved

__all__ = ["FileCheck", "ServerOwnedFiles", "SharedDirectory", "SnapshotFiles"]

NOTHING_AGAINST_IT = FileCheck()


class SnapshotFiles(Protocol):
    """What can be asked of the files. Nothing here raises: trouble is a reason."""

    @property
    def is_visible(self) -> bool: ...

    async def verify_saved(self, name: SnapshotName, saved: Saved) -> FileCheck:
        """After a save: is the file what the server claimed?"""
        ...

    async def make_durable(self, name: SnapshotName) -> FileCheck:
        """Make it private, and sure to survive the machine; its identity from then on."""
        ...

    async def verify_stored(self, generation: Generation) -> FileCheck:
        """Before a restore: is the file still what was published?"""
        ...

    async def ids_digest(self, name: SnapshotName) -> str | None:
        """Of the token ids in the file (see `manifest.digest_of_ids`); None if they cannot be read."""
        ...

    async def digest(self, name: SnapshotName, identity: FileIdentity | None = None) -> str | None:
        """SHA-256 in hex; None if it cannot be read or is not (or ceased to be) the file of `identity`."""
        ...

    async def delete(self, name: SnapshotName) -> bool:
        """True if the file is gone."""
        ...

    async def orphans(self, known: Collection[SnapshotName], owner: Owner) -> tuple[SnapshotName, ...]:
        """Files of `owner` that are not `known`. A save in flight must be among the known, and whoever
        deletes one looks again first: it may have been published since."""
        ...

    async def kind_of(self, name: SnapshotName) -> MemoryKind:
        """The kind of memory that the file shows; UNKNOWN if it shows none."""
        ...

    async def shared_tokens(self, name: SnapshotName, ids: Sequence[int]) -> int | None:
        """How many tokens at its beginning the file has in common with `ids`; None if it cannot be read."""
        ...

    async def open_window(self, name: SnapshotName, copy: SnapshotName, window: int) -> Closed | None:
        """Make `copy` of `name`, its sliding window of `window` tokens open; None if that was done."""
        ...

    async def cut_prefix(self, name: SnapshotName, cut: SnapshotName, tokens: int) -> Prefix | Uncut:
        """Make `cut`, a snapshot of the first `tokens` of those in `name`."""
        ...

    async def streams_of(self, name: SnapshotName) -> int | None:
        """How many memories the server has for its slots, by the file: 1 if they share it, 0 if it keeps no
        tokens apart (recurrent); None if the file does not show it."""
        ...

    async def at_sight(self, generations: Collection[Generation]) -> Sight:
        """What a look shows to be wrong, without reading anything."""
        ...

    async def free_bytes(self) -> int | None:
        """Room for more; None if not known."""
        ...

    async def check_usable(self) -> str | None:
        """The reason why the directory cannot be used; None if it can."""
        ...


class ServerOwnedFiles:
    """Files we cannot see: nothing is known against them, and nothing can be done about them."""

    is_visible = False

    async def verify_saved(self, name: SnapshotName, saved: Saved) -> FileCheck:
        if saved.tokens < 1:
            return FileCheck("the server saved no tokens")
        # Builds without a place to save to count the tokens, and write no file.
        return NOTHING_AGAINST_IT if saved.size_bytes > 0 else FileCheck("the server wrote no bytes")

    async def make_durable(self, name: SnapshotName) -> FileCheck:
        return NOTHING_AGAINST_IT

    async def verify_stored(self, generation: Generation) -> FileCheck:
        return NOTHING_AGAINST_IT

    async def ids_digest(self, name: SnapshotName) -> str | None:
        return None

    async def digest(self, name: SnapshotName, identity: FileIdentity | None = None) -> str | None:
        return None

    async def delete(self, name: SnapshotName) -> bool:
        return False

    async def orphans(self, known: Collection[SnapshotName], owner: Owner) -> tuple[SnapshotName, ...]:
        return ()

    async def kind_of(self, name: SnapshotName) -> MemoryKind:
        return MemoryKind.UNKNOWN

    async def shared_tokens(self, name: SnapshotName, ids: Sequence[int]) -> int | None:
        return None

    async def open_window(self, name: SnapshotName, copy: SnapshotName, window: int) -> Closed | None:
        return Closed.NOT_UNDERSTOOD

    async def cut_prefix(self, name: SnapshotName, cut: SnapshotName, tokens: int) -> Prefix | Uncut:
        return Uncut.NOT_UNDERSTOOD

    async def streams_of(self, name: SnapshotName) -> int | None:
        return None

    async def at_sight(self, generations: Collection[Generation]) -> Sight:
        return Sight()

    async def free_bytes(self) -> int | None:
        return None

    async def check_usable(self) -> str | None:
        return None


class SharedDirectory:
    """The server's save directory as we see it. Files are served by the server and judged by us."""

    is_visible = True

    def __init__(self, path: Path) -> None:
        self.path = path

    async def verify_saved(self, name: SnapshotName, saved: Saved) -> FileCheck:
        return await asyncio.to_thread(check_saved, self.path / name, saved)

    async def make_durable(self, name: SnapshotName) -> FileCheck:
        return await asyncio.to_thread(make_durable, self.path / name)

    async def verify_stored(self, generation: Generation) -> FileCheck:
        return await asyncio.to_thread(check_stored, self.path / generation.name, generation)

    async def ids_digest(self, name: SnapshotName) -> str | None:
        return await asyncio.to_thread(_ids_digest, self.path / name)

    async def digest(self, name: SnapshotName, identity: FileIdentity | None = None) -> str | None:
        return await asyncio.to_thread(digest_of, self.path / name, identity)

    async def delete(self, name: SnapshotName) -> bool:
        return is_ours(name) and await asyncio.to_thread(_delete, self.path / name)

    async def orphans(self, known: Collection[SnapshotName], owner: Owner) -> tuple[SnapshotName, ...]:
        named = frozenset(known)
        found = await asyncio.to_thread(_list_of, owner, self.path)
        return tuple(name for name in found if name not in named)

    async def kind_of(self, name: SnapshotName) -> MemoryKind:
        layout = await asyncio.to_thread(read_layout, self.path / name)
        return layout.kind if isinstance(layout, Layout) else MemoryKind.UNKNOWN

    async def shared_tokens(self, name: SnapshotName, ids: Sequence[int]) -> int | None:
        return await asyncio.to_thread(_shared_tokens, self.path / name, ids)

    async def open_window(self, name: SnapshotName, copy: SnapshotName, window: int) -> Closed | None:
        return await asyncio.to_thread(open_window, self.path / name, self.path / copy, window)

    async def cut_prefix(self, name: SnapshotName, cut: SnapshotName, tokens: int) -> Prefix | Uncut:
        return await asyncio.to_thread(cut_prefix, self.path / name, self.path / cut, tokens)

    async def streams_of(self, name: SnapshotName) -> int | None:
        layout = await asyncio.to_thread(read_layout, self.path / name)
        return layout.streams or 0 if isinstance(layout, Layout) else None

    async def at_sight(self, generations: Collection[Generation]) -> Sight:
        return await asyncio.to_thread(at_sight, self.path, generations)

    async def free_bytes(self) -> int | None:
        return await asyncio.to_thread(free_bytes, self.path)

    async def check_usable(self) -> str | None:
        return await asyncio.to_thread(_why_unusable, self.path)


def _ids_digest(path: Path) -> str | None:
    ids = read_token_ids(path)
    return None if ids is None else digest_of_ids(ids)


def _shared_tokens(path: Path, ids: Sequence[int]) -> int | None:
    stored = read_token_ids(path, len(ids))
    return None if stored is None else shared_length(stored, array("i", ids))


def _delete(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        # What cannot be deleted now is an orphan later, and found as one.
        return False
    return True


def _list_of(owner: Owner, directory: Path) -> tuple[SnapshotName, ...]:
    try:
        return tuple(SnapshotName(name) for name in sorted(os.listdir(directory)) if is_of(owner, name))
    except OSError:
        # `check_usable` tells the reason; a directory that cannot be listed has nothing to collect.
        return ()


def _why_unusable(directory: Path) -> str | None:
    try:
        os.listdir(directory)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return trouble_with(directory, error, SNAPSHOT_DIR)
