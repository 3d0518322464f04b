from __future__ import annotations

import pytest

from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.checkpoint.room import MARGIN_BYTES, estimated_bytes
from kvproxy.identifiers import SlotId
from kvproxy.snapshots.files import FileCheck
from kvproxy.telemetry.events import Warned
from kvproxy.upstream.replies import ActionFailure, Fault, Saved
from tests.support.fakes_core import A, B, World, generation_of, manifest_of, stay

S0 = SlotId(0)


class TestEstimate:
    @pytest.mark.parametrize(
        ("tokens", "saved", "expected"),
        [
            (1000, [], 0),
            (None, [(10, 100)], 0),
            (20, [(10, 100)], 200),
            (1000, [(10, 1100), (20, 1200)], 11_000),
            (20, [(10, 1100), (30, 1100)], 1100),
        ],
        ids=["nothing known", "unknown length", "one by the token", "a line", "fixed state"],
    )
    def test_it_is_the_line_that_earlier_snapshots_make(
        self, tokens: int | None, saved: list[tuple[int, int]], expected: int
    ) -> None:
        assert estimated_bytes(tokens, saved) == expected

    def test_one_long_snapshot_says_little_of_a_short_one_and_is_taken_whole(self) -> None:
        assert estimated_bytes(5, [(10, 100)]) == 100

    def test_a_longer_snapshot_that_is_lighter_makes_no_falling_line(self) -> None:
        assert estimated_bytes(100, [(10, 100), (20, 50)]) == 250


def world(*free: int | None) -> World:
    """A dirty A of 1000 tokens in slot 0; a snapshot of B has shown that a token weighs 1 MiB."""
    made = World()
    made.keep(manifest_of(B, generation_of(tokens=10, size_bytes=10 << 20)))
    made.house(0, stay(A))
    made.files.free = list(free)
    made.server.answer("save", Saved(1000, 5000))
    return made


NEEDED = int(1000 * (1 << 20) * 1.1) + MARGIN_BYTES


async def save(world: World) -> CheckpointOutcome:
    return (await world.checkpointer.save(S0, world.table.epoch, Trigger.IDLE)).outcome


async def test_what_is_certain_not_to_fit_is_not_begun_and_stays_dirty() -> None:
    w = world(NEEDED - 1)
    assert await save(w) is CheckpointOutcome.NO_ROOM
    assert "save 0" not in w.log
    assert w.state() == "resident"
    assert w.table.view(S0).is_dirty


async def test_what_just_fits_is_saved() -> None:
    w = world(NEEDED)
    assert await save(w) is CheckpointOutcome.PUBLISHED


async def test_a_directory_nobody_sees_is_taken_to_have_room() -> None:
    assert await save(world(None)) is CheckpointOutcome.PUBLISHED


async def test_retention_runs_first_and_may_make_room() -> None:
    w = world(NEEDED - 1, NEEDED)
    runs: list[str] = []

    async def collect() -> None:
        runs.append("collected")

    w.checkpointer.room.make_room = collect
    assert await save(w) is CheckpointOutcome.PUBLISHED
    assert runs == ["collected"]


async def test_the_operator_is_told_once_until_there_is_room_again() -> None:
    w = world(0)
    for _ in range(3):
        await save(w)
    assert len(w.sink.of(Warned)) == 1
    w.files.free = [NEEDED]
    assert await save(w) is CheckpointOutcome.PUBLISHED
    w.files.free = [0]
    w.house(0, stay(A, revision=2, saved=1))
    await save(w)
    assert len(w.sink.of(Warned)) == 2


async def test_a_life_that_passes_while_the_disk_is_looked_at_gets_no_save() -> None:
    w = world(NEEDED - 1, NEEDED)

    async def die() -> None:
        w.live()

    w.checkpointer.room.make_room = die
    assert await save(w) is CheckpointOutcome.SUPERSEDED
    assert "save 0" not in w.log


async def test_what_is_lacking_is_known_until_there_is_room_for_it() -> None:
    w = world(0)
    room = w.checkpointer.room
    assert room.lack == ""
    await save(w)
    assert "0 bytes are free where the snapshots lie" in room.lack
    assert "retention.max_total_bytes" in room.lack
    w.files.free = [NEEDED - 1]
    await room.look()
    assert room.lack
    w.files.free = [NEEDED]
    await room.look()
    assert room.lack == ""


@pytest.mark.parametrize("how", ["refused", "a stump"])
async def test_a_disk_that_fills_up_during_a_save_is_named_and_known_until_one_is_published(how: str) -> None:
    w = world(NEEDED, 0)
    if how == "refused":
        w.server.answer("save", ActionFailure(Fault.FAILED, "HTTP 500: Unable to save slot", 500))
    else:
        w.files.saved = FileCheck("file is 10 bytes instead of 5000")
    result = await w.checkpointer.save(S0, w.table.epoch, Trigger.IDLE)
    assert result.outcome.is_failure
    assert "0 bytes are free where the snapshots lie" in result.detail
    assert result.detail.endswith(w.checkpointer.room.lack)
    assert len(w.sink.of(Warned)) == 1

    w.files.free = [NEEDED]
    await w.checkpointer.room.look()
    assert w.checkpointer.room.lack  # what the failed save left behind is deleted: that is no sign of room
    w.files.saved = FileCheck()
    w.server.answer("save", Saved(1000, 5000))
    assert await save(w) is CheckpointOutcome.PUBLISHED
    assert w.checkpointer.room.lack == ""


async def test_a_full_disk_under_the_state_directory_is_named_as_such() -> None:
    w = world(NEEDED)
    w.store.fails, w.store.free = True, 100
    result = await w.checkpointer.save(S0, w.table.epoch, Trigger.IDLE)
    assert result.outcome is CheckpointOutcome.STORE_FAILED
    assert "100 bytes are free where the state directory lies; nothing is saved" in result.detail
    assert result.detail.endswith(w.checkpointer.room.lack)

    w.store.fails, w.store.free = False, None
    assert await save(w) is CheckpointOutcome.PUBLISHED
    assert w.checkpointer.room.lack == ""


async def test_what_fails_with_room_on_both_disks_is_not_put_down_to_them() -> None:
    w = world(NEEDED)
    w.store.fails, w.store.free = True, 1 << 20
    result = await w.checkpointer.save(S0, w.table.epoch, Trigger.IDLE)
    assert (result.detail, w.checkpointer.room.lack) == ("the disk is full", "")
