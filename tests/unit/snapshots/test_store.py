from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvproxy.errors import ErrorCode, InvariantError, StateDirError
from kvproxy.snapshots.manifest import FileIdentity, generation_to_restore
from kvproxy.snapshots.state_dir import StateDir, file_name
from kvproxy.snapshots.store import (
    RESTORE_NEVER_ENDED,
    Published,
    Removed,
    SnapshotStore,
    StoreFailure,
)
from kvproxy.telemetry.events import SnapshotInvalidated, SnapshotsChanged, Warned
from tests.unit.snapshots.samples import (
    FINGERPRINT,
    KEY,
    OTHER_FINGERPRINT,
    OTHER_KEY,
    FakeClock,
    Sink,
    generation,
    publication,
)
from tests.unit.snapshots.steps import STEPS, Crash, crash_at, fail_at

CLOCK = FakeClock()


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def store(tmp_path: Path, sink: Sink, clock: FakeClock) -> AsyncIterator[SnapshotStore]:
    made = SnapshotStore(tmp_path, clock=clock, emit=sink)
    await made.open()
    yield made
    await made.close()


async def reopened(store: SnapshotStore, directory: Path, sink: Sink | None = None) -> SnapshotStore:
    """The same directory after a restart of kvproxy."""
    await store.close()
    return await opened(directory, sink)


async def opened(directory: Path, sink: Sink | None = None) -> SnapshotStore:
    made = SnapshotStore(directory, clock=FakeClock(), emit=sink or Sink())
    await made.open()
    return made


def die(store: SnapshotStore) -> None:
    """What a kill leaves of a store: nothing is written any more, and the lock is free."""
    assert store._lock is not None
    store._lock.release()


def block(directory: Path) -> None:
    """No manifest can be written any more, also not by root."""
    (directory / "manifests").rename(directory / "manifests.away")


def unblock(directory: Path) -> None:
    (directory / "manifests.away").rename(directory / "manifests")


async def published(store: SnapshotStore, **changes: object) -> Published:
    done = await store.publish(publication(**changes))  # type: ignore[arg-type]
    assert isinstance(done, Published)
    return done


async def test_the_owner_of_files_outlives_a_restart_and_differs_between_directories(
    store: SnapshotStore, tmp_path: Path
) -> None:
    owner = store.owner
    other = await opened(tmp_path / "other")
    again = await reopened(store, tmp_path)

    assert again.owner == owner != other.owner
    await again.close()
    await other.close()


def test_a_store_that_was_not_opened_has_no_owner(tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match="never opened"):
        _ = SnapshotStore(tmp_path, clock=CLOCK, emit=Sink()).owner


class TestPublish:
    async def test_the_first_generation_of_a_session_is_its_current_one(self, store: SnapshotStore) -> None:
        done = await published(store)

        assert (done.manifest.previous, done.superseded) == (None, ())
        assert store.find(KEY, FINGERPRINT) is done.manifest

    async def test_the_current_one_becomes_the_previous_and_the_previous_is_superseded(
        self, store: SnapshotStore
    ) -> None:
        first, second, third = [await published(store) for _ in range(3)]

        assert third.manifest.previous == second.manifest.current
        assert (second.superseded, third.superseded) == ((), (first.manifest.current.name,))

    async def test_an_invalid_one_is_superseded_and_the_last_good_one_kept(
        self, store: SnapshotStore
    ) -> None:
        good, bad = await published(store), await published(store)
        await store.invalidate(KEY, FINGERPRINT, bad.manifest.current.name, "bad")

        done = await published(store)

        assert done.manifest.previous == good.manifest.current
        assert done.superseded == (bad.manifest.current.name,)

    async def test_another_fingerprint_of_the_session_is_left_alone(self, store: SnapshotStore) -> None:
        old = await published(store)

        done = await published(store, fingerprint=OTHER_FINGERPRINT)

        assert (done.manifest.previous, done.superseded) == (None, ())
        assert store.find(KEY, FINGERPRINT) is old.manifest

    async def test_the_session_is_as_old_as_its_first_generation(
        self, store: SnapshotStore, clock: FakeClock
    ) -> None:
        await published(store)
        clock.seconds = 2_000.0

        done = await published(store)

        assert (done.manifest.created_at, done.manifest.last_used_at) == (1_000.0, 2_000.0)

    async def test_a_name_is_published_once(self, store: SnapshotStore) -> None:
        one = generation()
        await published(store, one=one)

        again = await store.publish(publication(one, key=OTHER_KEY))

        assert again == StoreFailure(f"{one.name} is published already")

    async def test_it_is_on_disk_when_it_is_told(self, store: SnapshotStore, tmp_path: Path) -> None:
        done = await published(store)
        die(store)

        assert (await opened(tmp_path)).all() == (done.manifest,)

    async def test_a_failure_is_a_value_and_changes_nothing(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        before = await published(store)
        block(tmp_path)

        failure = await store.publish(publication())

        assert isinstance(failure, StoreFailure)
        assert "No such file or directory" in failure.reason
        assert store.all() == (before.manifest,)

    async def test_a_model_name_that_is_long_or_not_text_can_be_written(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        done = await published(store, model="\ud800" + "m" * 100_000)

        assert len(done.manifest.model) == 256
        assert (await reopened(store, tmp_path)).all() == (done.manifest,)

    async def test_two_at_once_both_land_and_none_is_lost(self, store: SnapshotStore) -> None:
        done = await asyncio.gather(*(published(store) for _ in range(5)))

        superseded = [name for one in done for name in one.superseded]
        made = {one.manifest.current.name for one in done}
        assert made == store.names() | set(superseded)
        assert (len(store.names()), len(superseded)) == (2, 3)


class TestCancel:
    async def test_a_change_that_has_begun_is_finished_and_told_right(
        self, tmp_path: Path, sink: Sink
    ) -> None:
        gate, entered = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def observe(step: str) -> None:
            if step == "opened":
                loop.call_soon_threadsafe(entered.set)
                gate.wait(5)

        store = SnapshotStore(tmp_path, clock=CLOCK, emit=sink, observe=observe)
        await store.open()
        one = generation()
        caller = asyncio.ensure_future(store.publish(publication(one)))
        await entered.wait()

        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        gate.set()
        await store.close()

        assert store.names() == {one.name}
        assert (await opened(tmp_path)).names() == {one.name}


class TestCrash:
    @pytest.mark.parametrize("step", STEPS)
    async def test_stopped_at_any_step_of_publish_the_old_snapshot_or_the_new_one_is_found(
        self, tmp_path: Path, step: str
    ) -> None:
        before = await opened(tmp_path)
        old = (await published(before)).manifest
        await before.close()
        crashing = SnapshotStore(tmp_path, clock=CLOCK, emit=Sink(), observe=crash_at(step))
        await crashing.open()
        new = generation()

        with pytest.raises(Crash):
            await crashing.publish(publication(new))
        die(crashing)
        sink = Sink()
        (found,) = (await opened(tmp_path, sink)).all()

        if step in ("renamed", "settled"):
            assert (found.current, found.previous) == (new, old.current)
        else:
            assert found == old
        assert sink.of(Warned) == []
        assert os.listdir(tmp_path / "manifests") == [file_name(old)]

    @pytest.mark.parametrize("step", STEPS)
    async def test_stopped_at_any_step_of_the_first_publish_there_is_a_whole_snapshot_or_none(
        self, tmp_path: Path, step: str
    ) -> None:
        crashing = SnapshotStore(tmp_path, clock=CLOCK, emit=Sink(), observe=crash_at(step))
        await crashing.open()
        new = generation()

        with pytest.raises(Crash):
            await crashing.publish(publication(new))
        die(crashing)
        found = (await opened(tmp_path)).all()

        assert [one.current for one in found] == ([new] if step in ("renamed", "settled") else [])


class TestAmend:
    async def test_what_was_learned_of_a_file_is_kept(self, store: SnapshotStore, tmp_path: Path) -> None:
        name = (await published(store)).manifest.current.name
        identity = FileIdentity(device=1, inode=2, size=100, mtime_ns=3, ctime_ns=4)

        await store.amend(KEY, FINGERPRINT, name, sha256="0" * 64)
        await store.amend(KEY, FINGERPRINT, name, identity=identity)

        (found,) = (await reopened(store, tmp_path)).all()
        assert (found.current.sha256, found.current.identity) == ("0" * 64, identity)

    async def test_a_generation_that_is_no_more_is_not_brought_back(self, store: SnapshotStore) -> None:
        name = (await published(store)).manifest.current.name
        await store.delete(KEY)

        assert await store.amend(KEY, FINGERPRINT, name, sha256="0" * 64) is None
        assert store.all() == ()


class TestInvalidate:
    async def test_it_is_not_restored_again_and_the_one_before_it_is(
        self, store: SnapshotStore, sink: Sink, tmp_path: Path
    ) -> None:
        good, bad = await published(store), await published(store)

        await store.invalidate(KEY, FINGERPRINT, bad.manifest.current.name, "file is missing")

        (found,) = (await reopened(store, tmp_path)).all()
        assert found.current.invalid_reason == "file is missing"
        assert generation_to_restore(found) == good.manifest.current
        assert sink.of(SnapshotInvalidated) == [SnapshotInvalidated("a" * 12, "file is missing")]

    async def test_it_holds_also_where_it_cannot_be_written(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        name = (await published(store)).manifest.current.name
        block(tmp_path)

        failure = await store.invalidate(KEY, FINGERPRINT, name, "bad")

        assert isinstance(failure, StoreFailure)
        (found,) = store.all()
        assert generation_to_restore(found) is None

    async def test_it_is_written_at_close_if_it_could_not_be_before(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        name = (await published(store)).manifest.current.name
        block(tmp_path)
        await store.invalidate(KEY, FINGERPRINT, name, "bad")
        unblock(tmp_path)

        (found,) = (await reopened(store, tmp_path)).all()

        assert found.current.invalid_reason == "bad"

    async def test_the_first_reason_stands_and_is_told_once(self, store: SnapshotStore, sink: Sink) -> None:
        name = (await published(store)).manifest.current.name

        for reason in ("first", "second"):
            await store.invalidate(KEY, FINGERPRINT, name, reason)

        (found,) = store.all()
        assert found.current.invalid_reason == "first"
        assert len(sink.of(SnapshotInvalidated)) == 1

    async def test_what_is_not_there_cannot_become_invalid(self, store: SnapshotStore, sink: Sink) -> None:
        assert await store.invalidate(KEY, FINGERPRINT, generation().name, "bad") is None
        assert sink.of(SnapshotInvalidated) == []

    async def test_a_long_reason_is_cut_so_that_the_manifest_can_be_read_again(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        name = (await published(store)).manifest.current.name

        await store.invalidate(KEY, FINGERPRINT, name, "x" * 100_000)

        assert len((await reopened(store, tmp_path)).all()) == 1


class TestIdentityReturns:
    async def test_a_snapshot_is_invisible_under_another_fingerprint_and_visible_when_its_own_returns(
        self, store: SnapshotStore
    ) -> None:
        old = (await published(store)).manifest

        assert store.find(KEY, OTHER_FINGERPRINT) is None
        assert [one.fingerprint.diff(OTHER_FINGERPRINT) for one in store.find_any(KEY)] == [("model_path",)]

        await published(store, fingerprint=OTHER_FINGERPRINT)
        assert store.find(KEY, FINGERPRINT) is old


class TestTouch:
    async def test_the_last_use_counts_at_once_and_is_written_at_close(
        self, store: SnapshotStore, clock: FakeClock, tmp_path: Path
    ) -> None:
        await published(store)
        clock.seconds = 5_000.0

        store.touch(KEY, FINGERPRINT)

        assert [one.last_used_at for one in store.all()] == [5_000.0]
        assert [one.last_used_at for one in (await reopened(store, tmp_path)).all()] == [5_000.0]

    async def test_it_touches_no_file(self, store: SnapshotStore, tmp_path: Path) -> None:
        path = tmp_path / "manifests" / file_name((await published(store)).manifest)
        before = path.stat()

        store.touch(KEY, FINGERPRINT)

        assert path.stat() == before

    async def test_a_session_without_a_snapshot_is_not_made_by_it(self, store: SnapshotStore) -> None:
        store.touch(KEY, FINGERPRINT)

        assert store.all() == ()

    async def test_it_is_not_lost_to_a_write_that_runs_meanwhile(self, tmp_path: Path) -> None:
        clock = FakeClock()

        def observe(step: str) -> None:
            if step == "synced" and clock.seconds == 2_000.0:
                done = threading.Event()
                loop.call_soon_threadsafe(lambda: (later(), done.set()))
                done.wait(5)

        def later() -> None:
            clock.seconds = 3_000.0
            store.touch(KEY, FINGERPRINT)

        loop = asyncio.get_running_loop()
        store = SnapshotStore(tmp_path, clock=clock, emit=Sink(), observe=observe)
        await store.open()
        await published(store)
        clock.seconds = 2_000.0

        await published(store)

        assert [one.last_used_at for one in store.all()] == [3_000.0]
        assert [one.last_used_at for one in (await reopened(store, tmp_path)).all()] == [3_000.0]


class TestDelete:
    async def test_a_session_goes_with_all_its_fingerprints_and_no_other(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        done = [
            await published(store),
            await published(store),
            await published(store, fingerprint=OTHER_FINGERPRINT),
        ]
        other = await published(store, key=OTHER_KEY)

        removed = await store.delete(KEY)

        assert set(removed.names) == {one.manifest.current.name for one in done}
        assert (removed.failure, store.all()) == (None, (other.manifest,))
        assert (await reopened(store, tmp_path)).all() == (other.manifest,)

    async def test_an_unknown_session_is_nothing_to_remove(self, store: SnapshotStore) -> None:
        assert await store.delete(KEY) == Removed(())

    async def test_what_cannot_be_removed_is_kept_and_told(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        one = (await published(store)).manifest
        path = tmp_path / "manifests" / file_name(one)
        path.unlink()
        path.mkdir()

        removed = await store.delete(KEY)

        assert removed.names == ()
        assert removed.failure is not None
        assert store.all() == (one,)
        path.rmdir()


class TestForget:
    async def test_the_previous_one_takes_the_place_of_a_forgotten_current_one(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        first, second = await published(store), await published(store)

        removed = await store.forget([second.manifest.current.name])

        assert removed == Removed((second.manifest.current.name,))
        (found,) = (await reopened(store, tmp_path)).all()
        assert (found.current, found.previous) == (first.manifest.current, None)

    async def test_a_manifest_without_generations_goes(self, store: SnapshotStore, tmp_path: Path) -> None:
        done = await published(store)

        await store.forget([done.manifest.current.name, generation().name])

        assert (store.all(), os.listdir(tmp_path / "manifests")) == ((), [])

    async def test_on_a_full_disk_it_is_forgotten_all_the_same_so_that_its_file_can_make_room(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        first, second = await published(store), await published(store)
        block(tmp_path)

        removed = await store.forget([first.manifest.current.name])

        assert (removed.names, removed.failure is None) == ((first.manifest.current.name,), False)
        assert store.names() == {second.manifest.current.name}
        unblock(tmp_path)


class TestRestoringMark:
    async def test_a_restore_that_never_ended_makes_its_snapshot_invalid(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        good, bad = await published(store), await published(store)
        await store.mark_restoring(bad.manifest.current.name)
        die(store)
        sink = Sink()

        (found,) = (await opened(tmp_path, sink)).all()

        assert found.current.invalid_reason == RESTORE_NEVER_ENDED
        assert generation_to_restore(found) == good.manifest.current
        assert len(sink.of(SnapshotInvalidated)) == 1
        assert os.listdir(tmp_path / "restoring") == []

    async def test_a_restore_that_ended_leaves_its_snapshot_as_it_was(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        done = await published(store)
        name = done.manifest.current.name

        await store.mark_restoring(name)
        assert store.restoring() == {name}
        await store.clear_restoring(name)
        assert store.restoring() == frozenset()

        assert (await reopened(store, tmp_path)).all() == (done.manifest,)

    async def test_a_mark_stays_for_the_next_start_if_its_meaning_cannot_be_written_down(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        name = (await published(store)).manifest.current.name
        await store.mark_restoring(name)
        await store.close()

        full = SnapshotStore(tmp_path, clock=CLOCK, emit=Sink(), observe=fail_at("written"))
        await full.open()

        assert [generation_to_restore(one) for one in full.all()] == [None]
        await full.close()
        assert [generation_to_restore(one) for one in (await opened(tmp_path)).all()] == [None]

    async def test_a_mark_of_a_snapshot_that_is_no_more_is_cleared(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        await store.mark_restoring(generation().name)
        sink = Sink()

        await reopened(store, tmp_path, sink)

        assert (os.listdir(tmp_path / "restoring"), sink.of(SnapshotInvalidated)) == ([], [])

    async def test_a_mark_whose_caller_left_does_not_land_after_it_was_cleared(
        self, store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name, gate, mark = generation().name, threading.Event(), StateDir.mark_restoring
        monkeypatch.setattr(StateDir, "mark_restoring", lambda *args: (gate.wait(5), mark(*args))[1])
        marking = asyncio.ensure_future(store.mark_restoring(name))
        await asyncio.sleep(0)

        marking.cancel()
        clearing = asyncio.ensure_future(store.clear_restoring(name))
        # Long enough for a clearing that does not wait to be done by now.
        await asyncio.wait([clearing], timeout=0.05)
        gate.set()
        await clearing

        assert os.listdir(tmp_path / "restoring") == []

    async def test_a_mark_that_cannot_be_made_is_told(self, store: SnapshotStore, tmp_path: Path) -> None:
        (tmp_path / "restoring").rmdir()

        assert isinstance(await store.mark_restoring(generation().name), StoreFailure)


class TestOpen:
    async def test_each_manifest_that_cannot_be_read_is_one_warning(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        done = await published(store)
        for name in ("one.json", "two.json"):
            (tmp_path / "manifests" / name).write_bytes(b"{")
        sink = Sink()

        found = (await reopened(store, tmp_path, sink)).all()

        assert found == (done.manifest,)
        assert [one.code for one in sink.of(Warned)] == [ErrorCode.MANIFEST_INVALID] * 2
        assert sorted(os.listdir(tmp_path / "quarantine")) == ["one.json", "two.json"]

    async def test_an_owner_that_cannot_be_written_is_no_invalid_manifest(self, tmp_path: Path) -> None:
        (tmp_path / "owner").mkdir()
        sink = Sink()

        await (await opened(tmp_path, sink)).close()

        assert [one.code for one in sink.of(Warned)] == [ErrorCode.METADATA_IO]

    async def test_a_directory_in_use_is_refused(self, store: SnapshotStore, tmp_path: Path) -> None:
        with pytest.raises(StateDirError, match=f"process {os.getpid()};"):
            await opened(tmp_path)

    async def test_a_directory_that_cannot_be_read_is_not_left_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(directory: StateDir) -> None:
            raise StateDirError("cannot read")

        with monkeypatch.context() as patched:
            patched.setattr(StateDir, "load", refuse)
            with pytest.raises(StateDirError, match="cannot read"):
                await opened(tmp_path)

        await (await opened(tmp_path)).close()

    async def test_totals_are_told_at_once(self, store: SnapshotStore, tmp_path: Path) -> None:
        await published(store)
        sink = Sink()

        await reopened(store, tmp_path, sink)

        assert sink.of(SnapshotsChanged) == [SnapshotsChanged(valid=1, invalid=0, size_bytes=100)]


class TestClose:
    async def test_afterwards_nothing_is_written(self, store: SnapshotStore, tmp_path: Path) -> None:
        await store.close()

        assert await store.publish(publication()) == StoreFailure("the store is not open")
        assert isinstance(await store.mark_restoring(generation().name), StoreFailure)
        assert (os.listdir(tmp_path / "manifests"), store.all()) == ([], ())

    async def test_closing_again_is_harmless_also_if_another_has_opened_since(
        self, store: SnapshotStore, tmp_path: Path
    ) -> None:
        other = await reopened(store, tmp_path)

        await store.close()

        with pytest.raises(StateDirError):
            await opened(tmp_path)
        await other.close()


class TestTold:
    async def test_a_streak_of_failures_is_one_warning_and_the_next_streak_another(
        self, store: SnapshotStore, sink: Sink, tmp_path: Path
    ) -> None:
        name = (await published(store)).manifest.current.name
        for _ in range(2):
            block(tmp_path)
            await store.amend(KEY, FINGERPRINT, name, sha256="0" * 64)
            await store.mark_restoring(generation().name)
            await store.amend(KEY, FINGERPRINT, name, sha256="0" * 64)
            unblock(tmp_path)
            name = (await published(store)).manifest.current.name

        assert [one.code for one in sink.of(Warned)] == [ErrorCode.METADATA_IO] * 2

    async def test_a_publication_that_fails_is_told_by_its_save_alone(
        self, store: SnapshotStore, sink: Sink, tmp_path: Path
    ) -> None:
        block(tmp_path)

        assert isinstance(await store.publish(publication()), StoreFailure)
        assert sink.of(Warned) == []

    async def test_each_change_tells_the_totals_after_it(self, store: SnapshotStore, sink: Sink) -> None:
        name = (await published(store)).manifest.current.name
        await published(store)
        await store.invalidate(KEY, FINGERPRINT, name, "bad")
        await store.delete(KEY)

        told = [(one.valid, one.invalid, one.size_bytes) for one in sink.of(SnapshotsChanged)]
        assert told == [(0, 0, 0), (1, 0, 100), (2, 0, 200), (1, 1, 200), (0, 0, 0)]
