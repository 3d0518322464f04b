from __future__ import annotations

from typing import Any, cast

import pytest

from kvproxy.upstream.replies import ActionFailure, Completed, Fault
from kvproxy.upstream.trial import NOTHING_SEEN, PROBES, Trial, try_out
from tests.support.fakes_core import UNREACHABLE, FakeScratch, World, idle, processing

FRESH = (idle(0), idle(1))
EMPTIED = (idle(0, tokens=0), idle(1, tokens=4))
KEPT = (idle(0, tokens=4), idle(1, tokens=4))


class Room(World):
    def __init__(self, streams: int | None = None) -> None:
        super().__init__()
        self.scratch = FakeScratch(streams=streams)

    async def try_out(self, before: object, after: object = None, **answers: object) -> Trial:
        self.server.answer("slots", after)
        for verb, answer in answers.items():
            self.server.answer(verb, answer)
        return await try_out(cast(Any, self.server), cast(Any, before), self.scratch)


async def test_a_slot_emptied_by_a_request_in_another_is_the_proof() -> None:
    room = Room()
    assert (await room.try_out(FRESH, EMPTIED)).clears is True
    assert room.log == [
        f"evaluate 0 {len(PROBES[0])}",
        "save 0",
        f"evaluate 1 {len(PROBES[1])}",
        "slots",
        "erase 0",
        "erase 1",
    ]
    assert len(room.scratch.deleted) == 1


async def test_a_slot_that_still_holds_its_tokens_is_the_proof_of_the_contrary() -> None:
    assert (await Room().try_out(FRESH, KEPT)).clears is False


@pytest.mark.parametrize(("streams", "shares"), [(1, True), (2, False), (0, False), (None, None)])
async def test_the_file_of_a_few_tokens_tells_whether_slots_share_their_memory(
    streams: int | None, shares: bool | None
) -> None:
    assert (await Room(streams).try_out(FRESH, KEPT)).shares is shares


async def test_where_files_are_not_seen_none_is_written() -> None:
    room = Room(streams=1)
    room.scratch.is_visible = False
    assert (await room.try_out(FRESH, KEPT)) == Trial(clears=False, shares=None)
    assert "save 0" not in room.log


async def test_a_save_that_fails_tells_nothing_and_its_file_is_deleted_all_the_same() -> None:
    room = Room(streams=1)
    seen = await room.try_out(FRESH, KEPT, save=ActionFailure(Fault.FAILED, "Unable to save slot"))
    assert seen == Trial(clears=False, shares=None)
    assert len(room.scratch.deleted) == 1


@pytest.mark.parametrize(
    "before",
    [(), (idle(0),), (idle(0), processing(1)), (idle(0), idle(1, tokens=9))],
)
async def test_one_slot_a_busy_one_or_one_that_holds_something_is_left_alone(before: object) -> None:
    room = Room()
    assert await room.try_out(before) == NOTHING_SEEN
    assert room.log == []


async def test_no_action_meets_a_slot_that_did_not_answer() -> None:
    room = Room()
    room.server.answer("complete", Completed(4, 0), UNREACHABLE)
    assert (await room.try_out(FRESH)).clears is None
    assert [line for line in room.log if line.startswith("erase")] == ["erase 0"]

    room = Room()
    assert await room.try_out(FRESH, complete=UNREACHABLE) == NOTHING_SEEN
    assert [line for line in room.log if line.startswith("erase")] == []


async def test_a_server_that_does_not_compute_or_tell_proves_nothing() -> None:
    assert await Room(1).try_out(FRESH, complete=UNREACHABLE) == NOTHING_SEEN
    assert (await Room().try_out(FRESH, UNREACHABLE)).clears is None
    assert (await Room().try_out(FRESH, FRESH)).clears is None
