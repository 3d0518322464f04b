from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvproxy.identifiers import Owner
from kvproxy.slotfile.prefix import Prefix, Uncut
from kvproxy.slotfile.window import Closed
from kvproxy.snapshots import files as module
from kvproxy.snapshots.access import SNAPSHOT_DIR
from kvproxy.snapshots.checks import Sight
from kvproxy.snapshots.files import ServerOwnedFiles, SharedDirectory, SnapshotFiles
from kvproxy.snapshots.manifest import Generation
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.names import new_name
from kvproxy.upstream.replies import Saved
from tests.support.fakes_core import generation_of
from tests.unit.slotfile.samples import attention, recurrent, slot_file
from tests.unit.snapshots.samples import OWNER, generation, packed_file, put

DATA = packed_file([5, 6, 7])
SAVED = Saved(tokens=3, size_bytes=len(DATA))


@pytest.fixture
def shared(tmp_path: Path) -> SharedDirectory:
    return SharedDirectory(tmp_path)


def test_both_ways_to_the_files_answer_the_same_questions(tmp_path: Path) -> None:
    both: list[SnapshotFiles] = [ServerOwnedFiles(), SharedDirectory(tmp_path)]

    assert [files.is_visible for files in both] == [False, True]


async def test_nothing_is_known_against_a_file_we_cannot_see() -> None:
    files = ServerOwnedFiles()

    assert (await files.verify_saved(new_name(OWNER), SAVED)).is_ok
    assert (await files.verify_stored(generation())).is_ok
    assert (await files.digest(new_name(OWNER)), await files.free_bytes(), await files.check_usable()) == (
        None,
        None,
        None,
    )


async def test_a_file_we_cannot_see_cannot_be_deleted_or_found() -> None:
    files = ServerOwnedFiles()

    assert (await files.delete(new_name(OWNER)), await files.orphans((), OWNER)) == (False, ())


async def test_a_save_of_nothing_is_refused_also_where_we_cannot_see() -> None:
    assert not (await ServerOwnedFiles().verify_saved(new_name(OWNER), Saved(0, 40))).is_ok


async def test_a_saved_file_is_verified_stored_and_hashed_where_we_see_it(shared: SharedDirectory) -> None:
    name = put(shared.path, DATA)

    check = await shared.verify_saved(name, SAVED)
    digest = await shared.digest(name, check.identity)
    kept = generation(name=name, size_bytes=len(DATA), identity=check.identity, sha256=digest)

    assert digest is not None
    assert await shared.verify_stored(kept) == check
    assert check.is_ok


async def test_a_deleted_file_is_gone_and_deleting_it_again_is_no_failure(shared: SharedDirectory) -> None:
    name = put(shared.path, DATA)

    assert [await shared.delete(name), await shared.delete(name)] == [True, True]
    assert list(shared.path.iterdir()) == []


async def test_what_cannot_be_deleted_is_not_called_gone(shared: SharedDirectory) -> None:
    name = new_name(OWNER)
    (shared.path / name).mkdir()

    assert not await shared.delete(name)


@pytest.mark.parametrize("name", ["other.kv", "../a/other.kv", ""])
async def test_a_file_that_is_not_ours_is_never_deleted(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "other.kv").write_bytes(DATA)

    assert not await SharedDirectory(tmp_path / "a").delete(name)  # type: ignore[arg-type]
    assert (tmp_path / "a" / "other.kv").exists()


async def test_orphans_are_files_of_ours_that_nobody_knows(shared: SharedDirectory) -> None:
    known, orphan = put(shared.path, DATA), put(shared.path, DATA)
    (shared.path / "users-own.kv").write_bytes(DATA)

    assert await shared.orphans([known], OWNER) == (orphan,)


async def test_the_files_of_another_owner_in_the_same_directory_are_no_orphans(
    shared: SharedDirectory,
) -> None:
    theirs = put(shared.path, DATA, new_name(Owner("ffffffff")))
    put(shared.path, DATA)

    assert theirs not in await shared.orphans([], OWNER)
    assert await shared.orphans([], Owner("ffffffff")) == (theirs,)


async def test_a_directory_that_is_not_there_has_a_reason_and_nothing_else(tmp_path: Path) -> None:
    absent = SharedDirectory(tmp_path / "absent")

    told = await absent.check_usable()
    assert str(told).startswith(f"{tmp_path / 'absent'}: No such file or directory; create it")
    assert (await absent.orphans((), OWNER), await absent.free_bytes()) == ((), None)
    assert not (await absent.verify_saved(new_name(OWNER), SAVED)).is_ok


async def test_a_file_is_no_directory_to_use(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")

    told = await SharedDirectory(tmp_path / "a").check_usable()
    assert str(told).startswith(f"{tmp_path / 'a'}: Not a directory; move that file away, or set upstreams[]")


async def test_a_directory_that_cannot_be_written_has_a_reason(
    shared: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*, dir: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", refuse)

    told = f"{shared.path}: Read-only file system; mount it writable, or {SNAPSHOT_DIR}"
    assert await shared.check_usable() == told


async def test_looking_whether_a_directory_is_usable_leaves_nothing_there(shared: SharedDirectory) -> None:
    assert await shared.check_usable() is None
    assert list(shared.path.iterdir()) == []


async def test_room_is_told_in_bytes(shared: SharedDirectory) -> None:
    free = await shared.free_bytes()

    assert free is not None
    assert free > 0


async def test_the_loop_runs_on_while_a_file_is_hashed(
    shared: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, reached = asyncio.get_running_loop(), asyncio.Event()

    def slow(path: Path, identity: object) -> str:
        # Returns only once the loop has run: hashing on the loop itself would wait for ever.
        asyncio.run_coroutine_threadsafe(_reach(reached), loop).result(timeout=5)
        return "0" * 64

    monkeypatch.setattr(module, "digest_of", slow)

    assert await shared.digest(new_name(OWNER)) == "0" * 64
    assert reached.is_set()


async def _reach(event: asyncio.Event) -> None:
    event.set()


async def test_a_file_shows_its_kind_of_memory_or_that_it_shows_none(
    shared: SharedDirectory,
) -> None:
    name = new_name(OWNER)
    assert await shared.kind_of(name) is MemoryKind.UNKNOWN
    assert await ServerOwnedFiles().kind_of(name) is MemoryKind.UNKNOWN
    put(shared.path, slot_file(8, attention(range(8)), attention(range(4, 8))), name)
    assert await shared.kind_of(name) is MemoryKind.SLIDING_WINDOW


async def test_a_window_is_opened_and_a_prefix_cut_beside_the_file(shared: SharedDirectory) -> None:
    window, full, copy, cut = (new_name(OWNER) for _ in range(4))
    put(shared.path, slot_file(8, attention(range(8)), attention(range(4, 8))), window)
    put(shared.path, slot_file(8, attention(range(8))), full)
    assert await shared.open_window(window, copy, 4) is None
    assert await shared.kind_of(copy) is MemoryKind.SLIDING_WINDOW
    assert await shared.cut_prefix(full, cut, 3) == Prefix(3, (shared.path / cut).stat().st_size)
    assert await shared.shared_tokens(cut, [100, 101, 102, 103]) == 3
    assert await shared.shared_tokens(full, [100, 101, 9]) == 2
    assert await shared.shared_tokens(new_name(OWNER), [100]) is None


async def test_nothing_is_done_to_files_that_are_not_seen() -> None:
    files, name = ServerOwnedFiles(), new_name(OWNER)
    assert await files.open_window(name, new_name(OWNER), 4) is Closed.NOT_UNDERSTOOD
    assert await files.cut_prefix(name, new_name(OWNER), 4) is Uncut.NOT_UNDERSTOOD
    assert await files.shared_tokens(name, [1]) is None


@pytest.mark.parametrize(
    ("block", "streams"),
    [(attention(range(8)), 1), (attention(range(8), streams=3, stream=1), 3), (recurrent(7), 0)],
)
async def test_a_file_shows_how_many_memories_the_server_has_for_its_slots(
    shared: SharedDirectory, block: bytes, streams: int
) -> None:
    name = new_name(OWNER)
    put(shared.path, slot_file(8, block), name)
    assert await shared.streams_of(name) == streams


async def test_what_is_no_slot_file_shows_none(shared: SharedDirectory) -> None:
    name = new_name(OWNER)
    assert await shared.streams_of(name) is None
    put(shared.path, slot_file(8, attention(range(8)))[:-1], name)
    assert await shared.streams_of(name) is None
    assert await ServerOwnedFiles().streams_of(name) is None


class TestSight:
    """What a look shows without reading."""

    async def kept(self, shared: SharedDirectory) -> Generation:
        name = new_name(OWNER)
        data = slot_file(8, attention(range(8)))
        put(shared.path, data, name)
        checked = await shared.make_durable(name)
        return generation_of(name=name, tokens=8, size_bytes=len(data), identity=checked.identity)

    async def test_a_file_that_is_as_it_was_shows_nothing(self, shared: SharedDirectory) -> None:
        assert await shared.at_sight([await self.kept(shared)]) == Sight()

    async def test_one_that_is_gone_shortened_or_another_thing_is_told(self, shared: SharedDirectory) -> None:
        gone, short, link = [await self.kept(shared) for _ in range(3)]
        (shared.path / gone.name).unlink()
        os.truncate(shared.path / short.name, 9)
        (shared.path / link.name).unlink()
        (shared.path / link.name).symlink_to(shared.path / short.name)
        sight = await shared.at_sight([gone, short, link])
        assert sight.wrong == {
            gone.name: "file is missing",
            short.name: f"file is 9 bytes instead of {short.size_bytes}",
            link.name: "not a regular file",
        }

    async def test_where_another_file_system_is_now_nothing_is_said_of_its_files(
        self, shared: SharedDirectory
    ) -> None:
        kept = await self.kept(shared)
        assert kept.identity is not None
        (shared.path / kept.name).unlink()
        elsewhere = kept.identity.model_copy(update={"device": kept.identity.device + 1})
        assert await shared.at_sight([kept.model_copy(update={"identity": elsewhere})]) == Sight()

    async def test_a_directory_that_cannot_be_used_is_a_fault_and_says_nothing_of_its_files(
        self, tmp_path: Path
    ) -> None:
        absent = SharedDirectory(tmp_path / "absent")
        assert await absent.at_sight([generation_of()]) == Sight(
            f"{tmp_path / 'absent'}: No such file or directory; create it or bring it back, or {SNAPSHOT_DIR}"
        )

    async def test_files_that_nobody_sees_show_nothing(self) -> None:
        assert await ServerOwnedFiles().at_sight([generation_of()]) == Sight()


async def test_a_server_that_wrote_nothing_has_saved_nothing_though_we_cannot_look() -> None:
    """Builds without a place to save to count the tokens, and write no file."""
    check = await ServerOwnedFiles().verify_saved(new_name(OWNER), Saved(243, 0))
    assert check.reason == "the server wrote no bytes"
