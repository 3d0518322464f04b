from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvproxy.identifiers import SlotId
from kvproxy.slots.leases import Lease, Purpose, Want
from kvproxy.slots.settling import Settling
from kvproxy.upstream import probe as module
from kvproxy.upstream.probe import Flight, Probe
from kvproxy.upstream.replies import SlotInfo
from tests.support.fakes_core import UNREACHABLE, A, B, World, idle, processing, settle, stay

S0, S1 = SlotId(0), SlotId(1)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_LOOK_SECONDS", "QUIET_LOOK_SECONDS", "LAUNCH_LOOK_SECONDS"):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(module, "LOCATE_SECONDS", (0.0,))


class Room(World):
    def __init__(self, *, slots: int = 2) -> None:
        super().__init__(slots=slots)
        self.foreign: list[SlotId] = []
        self.looks: list[float] = []
        self.probe = Probe(
            cast(Any, self.server),
            self.table,
            self.desk,
            self.standing,
            self.clock,
            on_foreign=self.foreign.extend,
            on_look=lambda infos, began: self.looks.append(began),
        )

    async def launch(
        self, *before: SlotInfo, purpose: Purpose = Purpose.FLOATING, leaves_no_trace: bool = False
    ) -> tuple[Flight, asyncio.Task[None]]:
        """An unpinned request on its way, and the one who follows it."""
        lease = await self.desk.acquire(Want(purpose))
        self.server.answer("slots", before or (idle(0, task=1), idle(1, task=2)))
        flight = await self.probe.before_flight(lease, 100, leaves_no_trace=leaves_no_trace)
        following = asyncio.get_running_loop().create_task(self.follow(flight))
        return flight, following

    async def follow(self, flight: Flight) -> None:
        try:
            await self.probe.follow(flight)
        finally:
            flight.lease.release()

    def shows(self, *infos: SlotInfo) -> None:
        self.server.answer("slots", infos)

    async def until_narrowed(self, lease: Lease, *, to: tuple[SlotId, ...]) -> None:
        for _ in range(1000):
            if lease.slots == to and self.desk._gate is None:
                return
            await asyncio.sleep(0)
        pytest.fail(f"still holds {lease.slots}")


class TestSeenIdle:
    async def looked(self, room: Room, *answers: object) -> None:
        room.server.answer("slots", *answers)
        running = asyncio.get_running_loop().create_task(room.probe.run())
        room.probe.want()
        for _ in range(1000):
            if not room.table.unsettled:
                break
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    def drop(self, room: Room, slot: SlotId, *, was_seen: bool = True) -> None:
        room.table.serve(slot, room.table.epoch, stay(A))
        room.table.broke_off(slot, room.table.epoch, Settling(slot, was_seen=was_seen))

    async def test_a_dropped_request_is_looked_after_until_it_is_over(self) -> None:
        room = Room()
        self.drop(room, S0)

        await self.looked(room, (processing(0), idle(1)), UNREACHABLE, (idle(0), idle(1)))

        assert (room.state(), room.log) == ("resident", ["slots"] * 3)

    async def test_whoever_waits_for_the_slot_gets_it_then(self) -> None:
        room = Room(slots=1)
        self.drop(room, S0)
        waiting = asyncio.ensure_future(room.desk.acquire(Want(Purpose.PINNED, A)))
        await settle()

        await self.looked(room, (idle(0),))

        assert (await waiting).slot == S0

    async def test_nobody_looks_without_a_reason(self) -> None:
        room = Room()
        await self.looked(room, (idle(0), idle(1)))
        await settle()
        assert room.log == []

    async def test_a_look_at_a_life_that_passed_meanwhile_is_not_believed(self) -> None:
        room = Room()
        self.drop(room, S0)

        def pass_away() -> tuple[SlotInfo, ...]:
            room.table.begin_epoch(2)
            return (idle(0), idle(1))

        await self.looked(room, pass_away, (processing(0), idle(1)), (idle(0), idle(1)))

        assert room.log == ["slots"] * 3


class TestUnpinned:
    async def test_the_slot_it_runs_in_is_found_and_the_others_are_let_go(self) -> None:
        room = Room()
        flight, following = await room.launch()
        room.shows(idle(0, task=1), processing(1, task=3))

        await room.until_narrowed(flight.lease, to=(S1,))
        assert (room.state(0), room.state(1)) == ("idle", "serving")
        flight.end(was_dropped=False)
        await following

        assert room.state(1) == "idle"
        assert (flight.lease.is_released, room.desk.out) == (True, 0)

    async def test_whoever_lived_there_does_no_more(self) -> None:
        room = Room()
        room.house(1, stay(B))
        flight, following = await room.launch()
        room.shows(idle(0, task=1), processing(1, task=3))
        await room.until_narrowed(flight.lease, to=(S1,))
        flight.end(was_dropped=False)
        await following

        assert room.table.slot_of(B) is None

    async def test_a_session_adopts_the_slot_that_its_request_took_and_what_it_left_there(self) -> None:
        room = Room()
        flight, following = await room.launch()
        flight.stay = stay(A)
        room.shows(idle(0, task=1), processing(1, task=3))
        await room.until_narrowed(flight.lease, to=(S1,))
        assert room.table.view(S1).occupant == A

        flight.end(was_dropped=False, left=stay(A, revision=2))
        await following

        assert room.table.view(S1).occupancy == stay(A, revision=2)

    async def test_what_it_left_counts_in_its_slot_whosever_it_is(self) -> None:
        room = Room()
        flight, following = await room.launch()
        room.shows(idle(0, task=1), processing(1, task=3))
        await room.until_narrowed(flight.lease, to=(S1,))
        flight.end(was_dropped=False, tokens=77)
        await following
        assert room.table.view(S1).cells == 77

    async def test_an_answer_that_says_nothing_of_what_it_left_leaves_nobody(self) -> None:
        room = Room()
        flight, following = await room.launch()
        flight.stay = stay(A)
        room.shows(idle(0, task=1), processing(1, task=3))
        await room.until_narrowed(flight.lease, to=(S1,))
        flight.end(was_dropped=False)
        await following
        assert (room.state(1), room.table.slot_of(A)) == ("idle", None)

    async def test_a_slot_that_somebody_holds_still_is_not_adopted(self) -> None:
        room = Room()
        busy = await room.desk.acquire(Want(Purpose.PINNED, B))
        room.table.serve(S0, busy.epoch, stay(B))
        room.desk.launched(busy)
        flight, following = await room.launch(processing(0, task=1), idle(1, task=2))
        flight.stay = stay(A)
        room.table.served(S0, busy.epoch, stay(B))
        room.shows(processing(0, task=3), idle(1, task=2))
        await room.until_narrowed(flight.lease, to=())
        flight.end(was_dropped=False, left=stay(A))
        await following
        assert (room.state(0), room.table.slot_of(A)) == ("idle", None)
        busy.release()

    async def test_a_request_that_was_in_no_one_slot_adopts_none(self) -> None:
        room = Room()
        flight, following = await room.launch()
        flight.stay = stay(A)
        room.shows(idle(0, task=3), idle(1, task=4))
        flight.end(was_dropped=False, left=stay(A))
        await following
        assert room.table.slot_of(A) is None

    async def test_where_it_holds_only_the_slot_it_runs_in_the_others_need_not_wait_for_its_end(self) -> None:
        room = Room()
        busy = await room.desk.acquire(Want(Purpose.PINNED, A))
        room.table.serve(S0, busy.epoch, stay(A))
        room.desk.launched(busy)
        flight, following = await room.launch()
        assert flight.lease.slots == (S1,)
        waiting = asyncio.ensure_future(room.desk.acquire(Want(Purpose.PINNED, B)))
        await settle()
        room.table.served(S0, busy.epoch, stay(A))
        busy.release()
        await settle()
        assert not waiting.done()

        room.shows(idle(0, task=1), processing(1, task=3))

        assert (await waiting).slot == S0
        flight.end(was_dropped=False)
        await following

    async def test_one_that_took_the_place_of_a_request_that_just_ended_is_found_there(self) -> None:
        room = Room()
        busy = await room.desk.acquire(Want(Purpose.PINNED, A))
        room.table.serve(S0, busy.epoch, stay(A))
        room.desk.launched(busy)
        flight, following = await room.launch(processing(0, task=1), idle(1, task=2))
        room.shows(processing(0, task=3), idle(1, task=2))
        await settle()
        assert not flight.taken, "the answer of the one before is still on its way"
        room.table.served(S0, busy.epoch, stay(A))
        busy.release()

        await room.until_narrowed(flight.lease, to=())

        assert (room.state(0), room.table.slot_of(A)) == ("serving", None)
        flight.end(was_dropped=False)
        await following
        assert room.state(0) == "idle"

    async def test_a_request_that_somebody_waits_to_see_running_is_looked_for(self) -> None:
        room = Room()
        busy = await room.desk.acquire(Want(Purpose.PINNED, A))
        room.table.serve(S0, busy.epoch, stay(A))
        floating = asyncio.ensure_future(room.desk.acquire(Want(Purpose.FLOATING)))
        running = asyncio.ensure_future(room.probe.run())
        room.server.answer("slots", (idle(0), idle(1)), UNREACHABLE, (processing(0), idle(1)))
        await settle()
        room.probe.want()

        assert (await asyncio.wait_for(floating, 5)).slots == (S1,)

        running.cancel()
        assert room.log == ["slots"] * 3

    async def test_one_that_was_over_before_anybody_looked_is_found_by_what_the_slot_ran_last(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.house(1, stay(B))
        flight, following = await room.launch()
        room.shows(idle(0, task=1), idle(1, task=3))
        flight.end(was_dropped=False)
        await following

        assert (room.occupant(0), room.occupant(1)) == ("a" * 12, None)

    async def test_one_that_ran_in_no_slot_leaves_everybody_where_they_are(self) -> None:
        room = Room()
        room.house(0, stay(A))
        flight, following = await room.launch()
        room.shows(idle(0, task=1), idle(1, task=2))
        flight.end(was_dropped=False)
        await following

        assert (room.occupant(0), room.desk.out) == ("a" * 12, 0)

    async def test_where_nobody_can_look_it_was_in_all_that_it_held(self) -> None:
        room = Room()
        room.house(0, stay(A))
        flight, following = await room.launch()
        room.server.answer("slots", UNREACHABLE)
        flight.end(was_dropped=False)
        await following

        assert room.occupant(0) is None
        assert [room.state(0), room.state(1)] == ["idle", "idle"]

    async def test_one_that_leaves_no_trace_was_in_all_that_it_held(self) -> None:
        room = Room()
        room.house(0, stay(A))
        flight, following = await room.launch(purpose=Purpose.EXCLUSIVE, leaves_no_trace=True)
        room.shows(idle(0, task=1), idle(1, task=2))
        flight.end(was_dropped=False)
        await following

        assert room.occupant(0) is None

    async def test_one_that_needs_all_slots_holds_them_to_its_end(self) -> None:
        room = Room()
        flight, following = await room.launch(purpose=Purpose.EXCLUSIVE)
        room.shows(processing(0, task=3), idle(1, task=2))
        await settle()
        assert flight.lease.slots == (S0, S1)
        flight.end(was_dropped=False)
        await following
        assert room.desk.out == 0

    async def test_one_that_was_dropped_while_it_ran_leaves_its_slot_to_be_seen_idle(self) -> None:
        room = Room()
        flight, following = await room.launch()
        room.shows(idle(0, task=1), processing(1, task=3))
        await room.until_narrowed(flight.lease, to=(S1,))
        flight.end(was_dropped=True)
        await following

        assert [room.state(0), room.state(1)] == ["idle", "cancelling"]
        assert room.table.seen([idle(0), idle(1)])

    async def test_one_that_was_dropped_before_it_was_seen_may_still_start_in_any_of_its_slots(self) -> None:
        room = Room()
        room.house(0, stay(A))
        flight, following = await room.launch()
        flight.end(was_dropped=True)
        await following

        assert [room.state(0), room.state(1)] == ["cancelling", "cancelling"]
        assert not room.table.seen([idle(0), idle(1)]), "one look at idle slots proves nothing"

    async def test_a_life_that_passes_meanwhile_is_left_alone(self) -> None:
        room = Room()
        flight, following = await room.launch()
        room.live(2)
        room.house(0, stay(A))
        room.shows(processing(0, task=7), processing(1, task=8))
        await settle()
        flight.end(was_dropped=True)
        await following

        assert (room.occupant(0), room.state(1)) == ("a" * 12, "idle")


class TestExpected:
    """A request that was meant for a slot, where its session lives."""

    async def landed(self, room: Room, slot: SlotId, *, was_refused: bool) -> None:
        room.house(S0, stay(A))
        flight, following = await room.launch()
        flight.stay = flight.left = stay(A)
        flight.expected = S0
        ran = [idle(0, task=1), idle(1, task=2)]
        ran[slot] = idle(slot, task=9)
        room.shows(*ran)
        flight.end(was_dropped=False, was_refused=was_refused, left=None if was_refused else stay(A))
        await following

    async def test_in_another_slot_its_session_lives_there_and_nowhere_else(self) -> None:
        room = Room()
        await self.landed(room, S1, was_refused=False)
        assert [view.occupant for view in room.table.views()] == [None, A]

    async def test_refused_where_it_was_expected_it_changes_nothing(self) -> None:
        room = Room()
        await self.landed(room, S0, was_refused=True)
        assert [view.occupant for view in room.table.views()] == [A, None]

    async def test_refused_elsewhere_that_slot_is_nobodys(self) -> None:
        room = Room()
        await self.landed(room, S1, was_refused=True)
        assert room.table.view(S1).occupant is None


class TestForeign:
    async def look(self, room: Room, *infos: SlotInfo) -> None:
        room.clock.advance(1)
        room.probe.look_for_foreign(infos, room.clock.now())

    async def test_somebody_elses_use_is_told_and_looked_after(self) -> None:
        room = Room()
        room.house(0, stay(A))
        await self.look(room, idle(0, task=1), idle(1, task=2))
        await self.look(room, idle(0, task=1), processing(1, task=3))

        assert (room.foreign, room.occupant(0), room.state(1)) == ([S1], "a" * 12, "cancelling")
        assert room.probe._wanted.is_set()

    async def test_where_the_server_chooses_its_slots_they_are_not_ours_to_miss(self) -> None:
        room = Room()
        room.standing.set(pins=False)
        await self.look(room, idle(0, task=1), idle(1, task=2))
        await self.look(room, idle(0, task=4), processing(1, task=3))
        assert (room.foreign, room.state(1)) == ([], "idle")

    async def test_a_look_at_what_a_dropped_request_does_sees_them_too(self) -> None:
        room = Room()
        room.clock.advance(1)
        room.shows(idle(0, task=1), processing(1, task=9))
        await room.probe.look_once()
        assert room.foreign == [S1]


async def test_a_glance_is_one_look_whether_or_not_anything_waits_to_be_seen() -> None:
    room = Room()
    running = asyncio.ensure_future(room.probe.run())
    await settle()
    room.log.clear()
    room.probe.glance()
    await settle()
    running.cancel()
    assert room.log == ["slots"]
    assert len(room.looks) == 1


async def test_what_a_look_shows_is_judged_before_it_is_taken_in() -> None:
    room = Room()
    room.house(0, stay(A))
    room.clock.advance(1)
    believed: list[str | None] = []
    room.probe._on_look = lambda infos, began: believed.append(room.occupant(0))
    room.server.answer("slots", (idle(0, tokens=0), idle(1)))
    await room.probe.look_once()
    assert (believed, room.occupant(0)) == (["a" * 12], None)
