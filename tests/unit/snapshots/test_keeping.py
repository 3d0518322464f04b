from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from kvproxy.identifiers import Owner, SnapshotName
from kvproxy.snapshots.files import ServerOwnedFiles, SharedDirectory
from kvproxy.snapshots.keeping import SECONDS_PER_DAY, Keeper
from kvproxy.snapshots.names import new_name
from kvproxy.telemetry.events import Warned
from tests.support.clock import FakeClock
from tests.support.fakes_core import (
    OWNER,
    A,
    B,
    FakeFiles,
    FakeStore,
    Sink,
    generation_of,
    manifest_of,
    settle,
)


@dataclass(frozen=True)
class Bounds:
    max_total_bytes: int = 10**9
    max_snapshots: int = 100
    max_age_days: float | None = None


class Room:
    def __init__(self, bounds: Bounds | None = None, files: object | None = None) -> None:
        self.log: list[str] = []
        self.store = FakeStore(self.log)
        self.files = FakeFiles(self.log)
        self.sink = Sink()
        self.in_flight: set[SnapshotName] = set()
        self.keeper = Keeper(
            cast(Any, self.store),
            cast(Any, files or self.files),
            bounds or Bounds(),
            FakeClock(),
            self.sink,
            lambda: self.in_flight,
        )


async def test_nothing_goes_within_the_bounds() -> None:
    room = Room()
    room.store.index.put(manifest_of(A))

    assert await room.keeper.collect() == ()
    assert room.files.deleted == []


async def test_nothing_is_swept_while_it_is_not_known_whose_files_are_ours() -> None:
    room = Room()
    room.store.is_open = False
    room.files.left_behind = [new_name(OWNER)]

    assert await room.keeper.sweep() == ()


async def test_what_is_beyond_the_bounds_is_forgotten_and_its_file_deleted() -> None:
    room = Room(Bounds(max_snapshots=1))
    old = manifest_of(A, last_used_at=1.0)
    new = manifest_of(B, last_used_at=2.0)
    room.store.index.put(old)
    room.store.index.put(new)

    gone = await room.keeper.collect()

    assert gone == (old.current.name,) == tuple(room.files.deleted)
    assert room.store.all() == (new,)


async def test_what_is_being_restored_is_not_collected() -> None:
    room = Room(Bounds(max_snapshots=0))
    kept = manifest_of(A)
    room.store.index.put(kept)
    room.store.marks.add(kept.current.name)

    assert await room.keeper.collect() == ()


async def test_age_is_counted_in_days_since_the_last_use() -> None:
    room = Room(Bounds(max_age_days=2.0))
    now = FakeClock().wall()
    room.store.index.put(manifest_of(A, last_used_at=now - 2 * SECONDS_PER_DAY - 1))
    fresh = manifest_of(B, last_used_at=now - 2 * SECONDS_PER_DAY + 1)
    room.store.index.put(fresh)

    assert len(await room.keeper.collect()) == 1
    assert room.store.all() == (fresh,)


async def test_a_sweep_deletes_what_no_manifest_names_and_nothing_else() -> None:
    room = Room()
    known, orphan = manifest_of(A), new_name(OWNER)
    room.store.index.put(known)
    room.files.left_behind = [known.current.name, orphan]

    assert await room.keeper.sweep() == (orphan,)
    assert room.files.deleted == [orphan]


async def test_a_sweep_leaves_the_file_of_a_save_in_flight() -> None:
    room = Room()
    flying = new_name(OWNER)
    room.in_flight.add(flying)
    room.files.left_behind = [flying]

    assert await room.keeper.sweep() == ()


async def test_what_is_published_while_the_sweep_deletes_others_stays() -> None:
    first, second = new_name(OWNER), new_name(OWNER)

    class Publishing(FakeFiles):
        async def delete(self, name: SnapshotName) -> bool:
            room.store.index.put(manifest_of(A, generation_of(name=second)))
            return await super().delete(name)

    files = Publishing()
    room = Room(files=files)
    files.left_behind = [first, second]

    assert await room.keeper.sweep() == (first,)
    assert files.deleted == [first]


async def test_a_file_that_cannot_be_deleted_is_not_said_to_have_gone(tmp_path: Path) -> None:
    (tmp_path / new_name(OWNER)).mkdir()

    assert await Room(files=SharedDirectory(tmp_path)).keeper.sweep() == ()


async def test_a_sweep_leaves_the_files_of_another_kvproxy_in_the_same_directory(tmp_path: Path) -> None:
    ours, theirs = new_name(OWNER), new_name(Owner("ffffffff"))
    (tmp_path / ours).write_bytes(b"kv")
    (tmp_path / theirs).write_bytes(b"kv")

    swept = await Room(files=SharedDirectory(tmp_path)).keeper.sweep()

    assert swept == (ours,)
    assert [path.name for path in tmp_path.iterdir()] == [theirs]


async def test_where_files_cannot_be_seen_the_operator_is_told_once() -> None:
    room = Room(files=ServerOwnedFiles())

    await room.keeper.delete((new_name(OWNER),))
    await room.keeper.delete((new_name(OWNER),))
    await room.keeper.delete(())

    (warned,) = room.sink.of(Warned)
    assert "upstreams[].snapshot_dir" in warned.message


async def test_at_start_it_sweeps_at_once_and_collects_when_asked() -> None:
    room = Room(Bounds(max_snapshots=1))
    orphan = new_name(OWNER)
    room.files.left_behind = [orphan]
    running = asyncio.get_running_loop().create_task(room.keeper.run())
    await settle()
    assert room.files.deleted == [orphan]

    room.store.index.put(manifest_of(A, last_used_at=1.0))
    room.store.index.put(manifest_of(B, last_used_at=2.0))
    room.keeper.look()
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert len(room.files.deleted) == 2
    assert [manifest.key for manifest in room.store.all()] == [B]


async def test_a_dry_run_says_what_would_go_and_leaves_it() -> None:
    room = Room(Bounds(max_snapshots=0))
    known, orphan = manifest_of(A), new_name(OWNER)
    room.store.index.put(known)
    room.files.left_behind = [known.current.name, orphan]

    assert await room.keeper.collect(dry_run=True) == (known.current.name,)
    assert await room.keeper.sweep(dry_run=True) == (orphan,)
    assert room.files.deleted == []
    assert room.store.all() == (known,)
