"""The store of manifests: an index in memory over the state directory.

What is on disk is what the index says, with three exceptions on the safe side, each put right by the next
change or at close: a generation found invalid is invalid at once, and a forgotten one forgotten, even
if the disk is full (forgetting is how room is made); the time of last use waits for it.
A change that has begun is finished even if its caller is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from kvproxy.clock import Clock
from kvproxy.errors import ErrorCode, InvariantError
from kvproxy.identifiers import Owner, ServerName, SessionKey, SnapshotName, short
from kvproxy.snapshots.access import free_bytes
from kvproxy.snapshots.atomic import Observe, unobserved
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.index import SnapshotIndex, Totals
from kvproxy.snapshots.lock import StateLock
from kvproxy.snapshots.manifest import (
    FileIdentity,
    Generation,
    Manifest,
    generation_to_restore,
    with_generation,
    without_generations,
)
from kvproxy.snapshots.state_dir import Loaded, StateDir, file_name
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Emit, SnapshotInvalidated, SnapshotsChanged, TaskDied, Warned

RESTORE_NEVER_ENDED = "a restore of it never ended: the server or kvproxy died meanwhile"

MAX_MODEL_CHARS = 256
MAX_REASON_CHARS = 500

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Publication:
    """A verified file, and whose it is."""

    key: SessionKey
    server: ServerName
    model: str
    client_digest: str
    fingerprint: Fingerprint
    generation: Generation


@dataclass(frozen=True, slots=True)
class Published:
    """`superseded` are the files that no manifest names any more: the caller deletes them."""

    manifest: Manifest
    superseded: tuple[SnapshotName, ...]


@dataclass(frozen=True, slots=True)
class StoreFailure:
    """The state directory did not take it; what was there before stands."""

    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    """`names` are forgotten: the caller deletes the files. `failure` if something could not be written."""

    names: tuple[SnapshotName, ...]
    failure: StoreFailure | None = None


class SnapshotStore:
    """One per state directory and process. `observe` is told each step of a manifest's write."""

    def __init__(self, state_dir: Path, *, clock: Clock, emit: Emit, observe: Observe = unobserved) -> None:
        self._directory = StateDir(state_dir, observe=observe)
        self._clock = clock
        self._emit = emit
        self._index = SnapshotIndex()
        self._lock: StateLock | None = None
        self._owner: Owner | None = None
        self._restoring: set[SnapshotName] = set()
        self._unwritten: dict[str, Manifest] = {}
        """What the disk does not have yet, by file name: times of last use, and changes that failed."""
        self._writing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._is_failing = False
        self._changes = TaskSet(lambda name, error: emit(TaskDied(name, error)))

    # -- life ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Lock the state directory and read it. StateDirTaken if it is in use, StateDirError if unusable."""
        self._lock, loaded = await asyncio.to_thread(_open, self._directory)
        self._owner = loaded.owner
        for manifest in loaded.manifests:
            self._index.put(manifest)
        for complaint in loaded.complaints:
            self._emit(Warned(complaint, ErrorCode.MANIFEST_INVALID))
        if loaded.owner_failure is not None:
            self._emit(Warned(loaded.owner_failure, ErrorCode.METADATA_IO))
        for name in loaded.restoring:
            await self._condemn(name)
        self._tell_totals()

    async def close(self) -> None:
        """Finish what is being written, write what the disk lacks, unlock. May be called twice."""
        await self._changes.wait()
        if self._lock is None:
            return
        for manifest in list(self._unwritten.values()):
            await self._change(self._flush(manifest))
        self._lock.release()
        self._lock = None

    async def _condemn(self, name: SnapshotName) -> None:
        if (manifest := self._index.holding(name)) is not None:
            done = await self.invalidate(manifest.key, manifest.fingerprint, name, RESTORE_NEVER_ENDED)
            if isinstance(done, StoreFailure):
                return  # The mark stays: it is all that would tell the next start.
        await self.clear_restoring(name)

    @property
    def owner(self) -> Owner:
        """Whose snapshot files are ours to name and to sweep; made once per state directory."""
        if self._owner is None:
            raise InvariantError("the store was never opened: whose files are its own is not known yet")
        return self._owner

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    async def why_unusable(self) -> str:
        """Why the state directory is not what it was when it was opened; empty if it is."""
        return await asyncio.to_thread(self._directory.why_unusable, self._lock)

    async def free_bytes(self) -> int | None:
        """Room for more where the state directory lies; None if not known."""
        return await asyncio.to_thread(free_bytes, self._directory.path)

    # -- questions -----------------------------------------------------------------------------------------

    def find(self, key: SessionKey, fingerprint: Fingerprint) -> Manifest | None:
        return self._index.find(key, fingerprint)

    def find_any(self, key: SessionKey) -> tuple[Manifest, ...]:
        """All of a session, whatever the fingerprint; most recently used first."""
        return self._index.find_any(key)

    def all(self) -> tuple[Manifest, ...]:
        return tuple(self._index)

    def totals(self) -> Totals:
        return self._index.totals()

    def names(self) -> set[SnapshotName]:
        """Every file a manifest names."""
        return self._index.names()

    def restoring(self) -> frozenset[SnapshotName]:
        """Marked as being restored."""
        return frozenset(self._restoring)

    # -- changes -------------------------------------------------------------------------------------------

    async def publish(self, publication: Publication) -> Published | StoreFailure:
        """Make a generation the current one; the newest valid one before it becomes the previous."""
        return await self._change(self._publish(publication))

    async def amend(
        self,
        key: SessionKey,
        fingerprint: Fingerprint,
        name: SnapshotName,
        *,
        sha256: str | None = None,
        identity: FileIdentity | None = None,
    ) -> Manifest | StoreFailure | None:
        """Add what was learned of a generation's file. None if that generation is no more."""
        learned = {"sha256": sha256, "identity": identity}
        changes = {field: value for field, value in learned.items() if value is not None}
        return await self._change(self._update(key, fingerprint, name, changes))

    async def invalidate(
        self, key: SessionKey, fingerprint: Fingerprint, name: SnapshotName, reason: str
    ) -> Manifest | StoreFailure | None:
        """Never offer this generation again. Holds in memory even if it cannot be written."""
        return await self._change(self._invalidate(key, fingerprint, name, reason))

    def touch(self, key: SessionKey, fingerprint: Fingerprint) -> None:
        """The session was used now."""
        if (manifest := self._index.find(key, fingerprint)) is not None:
            used = manifest.model_copy(update={"last_used_at": self._clock.wall()})
            self._index.put(used)
            self._unwritten[file_name(used)] = used

    async def delete(self, key: SessionKey) -> Removed:
        """Remove a session with all its fingerprints."""
        names = {one.name for manifest in self.find_any(key) for one in manifest.generations}
        return await self.forget(names)

    async def forget(self, names: Collection[SnapshotName]) -> Removed:
        """Remove these generations; a manifest without any goes too."""
        return await self._change(self._forget(frozenset(names)))

    async def mark_restoring(self, name: SnapshotName) -> StoreFailure | None:
        """Before a restore: a mark still there at the next start makes the snapshot invalid."""
        self._restoring.add(name)
        return await self._change(self._mark(name, self._directory.mark_restoring))

    async def clear_restoring(self, name: SnapshotName) -> StoreFailure | None:
        """The restore ended, well or not, and the server lives."""
        self._restoring.discard(name)
        return await self._change(self._mark(name, self._directory.clear_restoring))

    # -- inside --------------------------------------------------------------------------------------------

    async def _change(self, work: Coroutine[Any, Any, T]) -> T:
        # A thread cannot be cancelled: leaving it alone would free the lock while it still writes, and
        # leave the index behind the disk.
        return await asyncio.shield(self._changes.spawn(work, name="snapshots.change"))

    def _writing_of(self, key: SessionKey, fingerprint: Fingerprint) -> asyncio.Lock:
        return self._writing.setdefault(f"{key}-{fingerprint.digest}", asyncio.Lock())

    async def _mark(
        self, name: SnapshotName, write: Callable[[SnapshotName], str | None]
    ) -> StoreFailure | None:
        # In order: a mark whose caller was cancelled must not land after it was cleared.
        async with self._writing.setdefault(name, asyncio.Lock()):
            return await self._on_disk(write, name)

    async def _publish(self, publication: Publication) -> Published | StoreFailure:
        async with self._writing_of(publication.key, publication.fingerprint):
            old = self._index.find(publication.key, publication.fingerprint)
            if self._index.holding(publication.generation.name) is not None:
                return StoreFailure(f"{publication.generation.name} is published already")
            new = _succeed(old, publication, self._clock.wall())
            if failure := await self._write(new, is_told=True):
                return failure
            kept = {one.name for one in new.generations}
            was = old.generations if old is not None else ()
            self._tell_totals()
            return Published(new, tuple(one.name for one in was if one.name not in kept))

    async def _update(
        self, key: SessionKey, fingerprint: Fingerprint, name: SnapshotName, changes: dict[str, Any]
    ) -> Manifest | StoreFailure | None:
        async with self._writing_of(key, fingerprint):
            manifest = self._index.find(key, fingerprint)
            if manifest is None or manifest.generation(name) is None:
                return None
            changed = with_generation(manifest, name, **changes)
            return await self._write(changed) or changed

    async def _invalidate(
        self, key: SessionKey, fingerprint: Fingerprint, name: SnapshotName, reason: str
    ) -> Manifest | StoreFailure | None:
        async with self._writing_of(key, fingerprint):
            manifest = self._index.find(key, fingerprint)
            one = manifest.generation(name) if manifest is not None else None
            if manifest is None or one is None:
                return None
            if not one.is_valid:
                return manifest
            changed = with_generation(manifest, name, invalid_reason=reason[:MAX_REASON_CHARS])
            self._index.put(changed)
            self._emit(SnapshotInvalidated(short(key), reason))
            self._tell_totals()
            return await self._write(changed) or changed

    async def _forget(self, names: frozenset[SnapshotName]) -> Removed:
        removed: list[SnapshotName] = []
        failure: StoreFailure | None = None
        for manifest in [one for one in self._index if _names_any(one, names)]:
            gone = await self._forget_in(manifest.key, manifest.fingerprint, names)
            removed.extend(gone.names)
            failure = gone.failure or failure
        if removed:
            self._tell_totals()
        return Removed(tuple(removed), failure)

    async def _forget_in(
        self, key: SessionKey, fingerprint: Fingerprint, names: frozenset[SnapshotName]
    ) -> Removed:
        async with self._writing_of(key, fingerprint):
            manifest = self._index.find(key, fingerprint)
            if manifest is None:
                return Removed(())
            rest = without_generations(manifest, names)
            if rest is None:
                failure = await self._remove(manifest)
            else:
                # A manifest on disk that names a deleted file is found out before that file is restored.
                self._index.put(rest)
                failure = await self._write(rest)
            left = self._index.find(key, fingerprint)
            kept = () if left is None else left.generations
            return Removed(tuple(one.name for one in manifest.generations if one not in kept), failure)

    async def _flush(self, manifest: Manifest) -> None:
        async with self._writing_of(manifest.key, manifest.fingerprint):
            latest = self._index.find(manifest.key, manifest.fingerprint)
            if latest is not None:
                await self._write(latest)

    async def _write(self, manifest: Manifest, *, is_told: bool = False) -> StoreFailure | None:
        self._unwritten.pop(file_name(manifest), None)
        failure = await self._on_disk(self._directory.write, manifest, is_told=is_told)
        if failure is None:
            self._is_failing = False
            self._index.put(self._with_latest_use(manifest))
        elif (latest := self._index.find(manifest.key, manifest.fingerprint)) is not None:
            self._unwritten[file_name(latest)] = latest
        return failure

    def _with_latest_use(self, manifest: Manifest) -> Manifest:
        # A touch may have come while the thread wrote.
        touched = self._unwritten.get(file_name(manifest))
        if touched is None:
            return manifest
        return manifest.model_copy(update={"last_used_at": touched.last_used_at})

    async def _remove(self, manifest: Manifest) -> StoreFailure | None:
        failure = await self._on_disk(self._directory.remove, manifest)
        if failure is None:
            self._index.remove(manifest)
            self._unwritten.pop(file_name(manifest), None)
        return failure

    async def _on_disk(
        self, work: Callable[[T], str | None], subject: T, *, is_told: bool = False
    ) -> StoreFailure | None:
        """`is_told`: the caller tells of a failure itself, as a save does that could not be published."""
        if self._lock is None:
            # Another process may own the directory by now.
            return StoreFailure("the store is not open")
        reason = await asyncio.to_thread(work, subject)
        if reason is None:
            return None
        if not is_told:
            self._warn(reason)
        return StoreFailure(reason)

    def _warn(self, reason: str) -> None:
        # Once until a manifest is written again: a full disk fails with every turn, and still takes a
        # mark or a removal.
        if not self._is_failing:
            self._is_failing = True
            self._emit(Warned(f"{reason}; conversations go on, snapshots may be lost", ErrorCode.METADATA_IO))

    def _tell_totals(self) -> None:
        totals = self._index.totals()
        self._emit(SnapshotsChanged(totals.valid, totals.invalid, totals.size_bytes))


def _open(directory: StateDir) -> tuple[StateLock, Loaded]:
    directory.prepare()
    lock = StateLock.acquire(directory.path)
    try:
        return lock, directory.load()
    except BaseException:
        lock.release()
        raise


def _succeed(old: Manifest | None, publication: Publication, now: float) -> Manifest:
    return Manifest(
        key=publication.key,
        server=publication.server,
        model=_printable(publication.model),
        client_digest=publication.client_digest,
        fingerprint=publication.fingerprint,
        current=publication.generation,
        previous=generation_to_restore(old) if old is not None else None,
        created_at=old.created_at if old is not None else now,
        last_used_at=now,
    )


def _printable(model: str) -> str:
    """The client may have named the model, so it may be long or not even text."""
    return model[:MAX_MODEL_CHARS].encode("utf-8", "replace").decode()


def _names_any(manifest: Manifest, names: Iterable[SnapshotName]) -> bool:
    return any(manifest.generation(name) is not None for name in names)
