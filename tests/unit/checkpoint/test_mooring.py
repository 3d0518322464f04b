from __future__ import annotations

import asyncio

from kvproxy.checkpoint.mooring import Moorings
from kvproxy.checkpoint.policy import CheckpointPolicy
from kvproxy.identifiers import SlotId
from kvproxy.slots.settling import Settling
from kvproxy.slots.slot import Occupancy
from kvproxy.upstream.replies import ActionFailure, Fault, Saved
from tests.support.fakes_core import A, B, World, idle, settle, stay

S0, S1 = SlotId(0), SlotId(1)


class Room(World):
    """A server that clears idle slots; session A was just answered in slot 0."""

    def __init__(self, policy: CheckpointPolicy | None = None, *, left: Occupancy | None = None) -> None:
        super().__init__(policy=policy)
        self.table.found_volatile()
        self.moorings = Moorings(self.table, self.checkpointer, self.policy)
        self.left = left or stay(A)
        self.house(0, self.left)

    async def moor(self) -> None:
        await self.moorings.moor(S0, self.table.epoch, self.left)


async def test_an_answer_is_saved_and_its_session_stays_where_it_is() -> None:
    room = Room()
    await room.moor()
    await settle()
    assert (room.log[0], room.occupant(), room.moorings.is_adrift(A)) == ("save 0", "a" * 12, False)
    assert not room.table.has_dirty


async def test_it_is_not_adrift_while_what_was_written_is_being_published() -> None:
    room = Room()
    durable: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    room.files.durable = durable
    await room.moor()
    room.table.serve(S1, room.table.epoch, stay(B))
    room.table.launched(S1, room.table.epoch)
    assert room.table.slot_of(A) is None
    assert (room.table.is_adrift(A), room.moorings.is_adrift(A)) == (True, False)


async def test_one_that_the_server_had_cleared_by_then_is_adrift_and_nothing_is_published() -> None:
    room = Room()
    room.server.answer("save", Saved(0, 36))
    await room.moor()
    await settle()
    assert (room.state(), room.moorings.is_adrift(A), room.store.find_any(A)) == ("idle", True, ())


async def test_one_that_cannot_be_saved_is_adrift() -> None:
    room = Room()
    room.server.answer("save", ActionFailure(Fault.FAILED, "HTTP 500", 500))
    await room.moor()
    assert (room.state(), room.moorings.is_adrift(A)) == ("idle", True)


async def test_one_that_is_not_to_be_saved_is_adrift() -> None:
    room = Room(CheckpointPolicy(on_switch=False))
    await room.moor()
    assert (room.log, room.moorings.is_adrift(A)) == ([], True)

    small = Room(left=stay(A, tokens=10))
    await small.moor()
    assert small.moorings.is_adrift(A)


async def test_one_whose_slot_was_taken_by_another_is_adrift_and_the_other_left_alone() -> None:
    room = Room()
    room.table.take(S0, room.table.epoch, stay(B))
    await room.moor()
    assert (room.log, room.occupant(), room.moorings.is_adrift(A)) == ([], "b" * 12, True)


async def test_what_is_saved_already_needs_nothing() -> None:
    room = Room(left=stay(A, saved=1))
    await room.moor()
    assert (room.log, room.occupant()) == ([], "a" * 12)


async def test_what_a_dropped_request_left_is_loose_until_somebody_saves_it() -> None:
    room = Room(left=stay(A, saved=1))
    assert room.moorings.loose == ()
    room.table.serve(S0, room.table.epoch, stay(A, saved=1))
    room.table.broke_off(S0, room.table.epoch, Settling(S0, was_seen=True))
    room.table.seen([idle(0), idle(1)])
    assert [view.id for view in room.moorings.loose] == [S0]

    await room.moorings.moor_loose(room.table.epoch)
    assert room.moorings.loose == ()
    await settle()

    assert "save 0" in room.log
    assert not room.table.has_dirty


async def test_on_a_server_that_keeps_its_slots_nothing_is_loose() -> None:
    room = World()
    room.house(0, stay(A))
    moorings = Moorings(room.table, room.checkpointer, room.policy)
    assert (moorings.loose, moorings.are_needed) == ((), False)


async def test_nothing_is_made_of_an_answer_of_a_passed_life() -> None:
    room = Room()
    epoch = room.table.epoch
    room.live()
    await room.moorings.moor(S0, epoch, room.left)
    assert (room.log, room.moorings.is_adrift(A)) == ([], False)
