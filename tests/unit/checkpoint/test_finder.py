from __future__ import annotations

from typing import Any, cast

from kvproxy.checkpoint.candidates import Chooser
from kvproxy.checkpoint.finder import Finder, Found
from kvproxy.checkpoint.outcome import Restoration, RestoreOutcome
from kvproxy.snapshots.manifest import Generation
from tests.support.fakes_core import FINGERPRINT, A, B, World, generation_of, manifest_of


class Room(World):
    """Session A has a snapshot, and one before it."""

    def __init__(self, *, looks: bool = True) -> None:
        super().__init__()
        chooser = Chooser(cast(Any, self.store), self.canaries, accepts_other_builds=True)
        self.finder = Finder(self.parts, chooser, verify=looks)
        self.newest, self.before = generation_of(), generation_of()
        self.keep(manifest_of(A, self.newest, self.before))

    async def found(self) -> Generation | RestoreOutcome:
        found = await self.finder.find(A)
        return found.outcome if isinstance(found, Restoration) else found.generation


async def test_the_newest_is_found_with_what_the_server_was_and_is() -> None:
    room = Room()
    assert await room.finder.find(A) == Found(room.newest, FINGERPRINT, FINGERPRINT)


async def test_of_a_session_never_saved_there_is_nothing_and_no_file_is_looked_at() -> None:
    room = Room()
    found = await room.finder.find(B)
    assert found == Restoration(RestoreOutcome.NO_SNAPSHOT)
    assert room.log == []


async def test_one_that_is_damaged_is_marked_and_the_one_before_it_stands_in() -> None:
    room = Room()
    room.files.bad[room.newest.name] = "is 1 byte short"
    assert await room.found() == room.before
    assert room.log == ["invalidate"]

    room.files.bad[room.before.name] = "is gone"
    assert await room.found() is RestoreOutcome.SNAPSHOT_INVALID


async def test_files_are_looked_at_only_where_that_is_wanted() -> None:
    room = Room(looks=False)
    room.files.bad[room.newest.name] = "is 1 byte short"
    assert await room.found() == room.newest


async def test_what_is_out_of_sight_is_not_condemned() -> None:
    room = Room()
    room.files.absence = "/slots: No such file or directory"
    assert await room.found() is RestoreOutcome.STORE_FAILED
    assert room.log == []


async def test_more_than_a_slot_holds_is_left_where_it_is() -> None:
    room = Room()
    room.keep(manifest_of(A, generation_of(tokens=4097)))
    assert await room.found() is RestoreOutcome.DOES_NOT_FIT
