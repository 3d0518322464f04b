from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvproxy.errors import CapacityError, ErrorCode, InvariantError, NotPinned, UpstreamError
from kvproxy.identifiers import SessionKey, SlotId
from kvproxy.slots.cells import may_run
from kvproxy.slots.leases import Lease, LeaseDesk, Purpose, Want
from kvproxy.slots.settling import Settling
from kvproxy.slots.state import SlotState
from kvproxy.slots.table import SlotTable
from tests.support.clock import FakeClock
from tests.support.fakes_core import A, B, C, idle, processing, settle, stay

S0, S1, S2 = (SlotId(n) for n in range(3))
FLOATING = Want(Purpose.FLOATING)
EXCLUSIVE = Want(Purpose.EXCLUSIVE)


def pinned(session: SessionKey | None = None, cells: int = 0) -> Want:
    return Want(Purpose.PINNED, session, cells)


class Room:
    def __init__(self, slots: int = 2, *, max_waiting: int = 8, max_wait_seconds: float = 30.0) -> None:
        self.clock = FakeClock()
        self.table = SlotTable(self.clock)
        self.changes = 0
        self.unseen = 0
        self.desk = LeaseDesk(
            self.table,
            self.clock,
            max_waiting=max_waiting,
            max_wait_seconds=max_wait_seconds,
            on_change=self._changed,
            on_unseen=self._look,
        )
        self.live(slots)

    def _changed(self) -> None:
        self.changes += 1

    def _look(self) -> None:
        self.unseen += 1

    def live(self, slots: int) -> None:
        self.table.begin_epoch(slots)
        self.desk.epoch_began()
        self.table.seen([idle(n) for n in range(slots)])
        self.desk.resume()

    def house(self, slot: SlotId, session: SessionKey) -> None:
        self.table.serve(slot, self.table.epoch, stay(session))
        self.table.served(slot, self.table.epoch, stay(session))

    async def ask(self, want: Want) -> asyncio.Task[Lease]:
        """A request that waits, or was granted at once."""
        task = asyncio.get_running_loop().create_task(self.desk.acquire(want))
        await settle(2)
        return task

    async def hold(self, want: Want) -> Lease:
        return await (await self.ask(want))

    async def run(self, want: Want) -> Lease:
        """A lease whose request was sent and is seen to run."""
        lease = await self.hold(want)
        self.table.serve(lease.slot, lease.epoch, None)
        self.desk.launched(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """The answer to the request of a lease that runs."""
        self.table.served(lease.slot, lease.epoch, None)
        lease.release()


async def gone(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class TestGranting:
    async def test_a_free_slot_is_granted_at_once(self) -> None:
        room = Room()
        lease = await room.desk.acquire(pinned(A))

        assert (lease.slot, lease.epoch, lease.waited_seconds, lease.is_fork) == (S0, 1, 0.0, False)
        assert (room.table.view(S0).is_leased, room.desk.out, room.desk.waiting) == (True, 1, 0)

    async def test_a_session_never_lives_in_two_slots_however_soon_its_second_request_comes(self) -> None:
        room = Room()
        first = await room.hold(pinned(A))
        second = await room.ask(pinned(A))
        assert not second.done()
        other = await room.hold(pinned(B))
        assert other.slot == S1
        other.release()

        room.table.serve(first.slot, first.epoch, stay(A))
        room.desk.reconsider()
        await settle()
        assert second.result().is_fork

    async def test_who_waits_for_a_slot_that_is_made_ready_gets_it_if_that_comes_to_nothing(self) -> None:
        room = Room()
        first = await room.hold(pinned(A))
        second = await room.ask(pinned(A))
        first.release()
        assert (await second).is_fork is False

    async def test_whoever_waits_is_served_when_a_slot_is_given_back_first_come_first(self) -> None:
        room = Room(1)
        first = await room.hold(pinned())
        second, third = await room.ask(pinned()), await room.ask(pinned())
        room.clock.advance(3)

        first.release()
        await settle()

        assert second.done()
        assert not third.done()
        assert second.result().waited_seconds == 3.0
        second.result().release()
        assert (await third).slot == S0

    async def test_the_slot_is_chosen_when_it_is_granted_not_when_it_is_asked_for(self) -> None:
        room = Room()
        one, other = await room.hold(pinned()), await room.hold(pinned())
        waiting = await room.ask(pinned(A))
        room.house(S1, A)

        one.release()
        await settle()
        assert not waiting.done(), "its own slot is busy being held by another"
        other.release()

        assert (await waiting).slot == S1

    async def test_one_that_waits_for_its_own_slot_does_not_hold_up_the_others(self) -> None:
        room = Room()
        room.house(S0, A)
        held, other = await room.hold(pinned(A)), await room.hold(pinned(B))
        own = await room.ask(pinned(A))
        stranger = await room.ask(pinned(C))

        other.release()
        await settle()

        assert not own.done()
        assert (await stranger).slot == S1
        held.release()
        assert (await own).slot == S0

    async def test_a_second_request_of_a_session_is_a_fork_once_the_first_is_being_served(self) -> None:
        room = Room()
        room.house(S0, A)
        await room.hold(pinned(A))
        second = await room.ask(pinned(A))
        assert not second.done(), "before it is sent, the first may still change places"

        room.table.serve(S0, room.table.epoch, stay(A))
        room.desk.reconsider()

        lease = await second
        assert (lease.slot, lease.is_fork) == (S1, True)

    async def test_a_lease_of_several_slots_has_no_single_one(self) -> None:
        room = Room()
        lease = await room.desk.acquire(EXCLUSIVE)
        with pytest.raises(InvariantError, match="holds 2 slots"):
            _ = lease.slot


class TestLine:
    async def test_a_full_line_turns_the_next_away_at_once(self) -> None:
        room = Room(1, max_waiting=1)
        held = await room.hold(pinned())
        waiting = await room.ask(pinned())

        with pytest.raises(CapacityError) as caught:
            await room.desk.acquire(pinned())

        assert (caught.value.code, caught.value.status) == (ErrorCode.QUEUE_FULL, 429)
        assert "queue.max_waiting" in caught.value.message
        held.release()
        await waiting

    async def test_a_line_of_no_places_still_serves_who_need_not_wait(self) -> None:
        room = Room(1, max_waiting=0)
        held = await room.desk.acquire(pinned())

        with pytest.raises(CapacityError):
            await room.desk.acquire(pinned())

        assert room.desk.waiting == 0
        held.release()
        assert (await room.desk.acquire(pinned())).slot == S0

    async def test_one_that_waited_too_long_is_told_so_and_leaves_the_line(self) -> None:
        room = Room(1, max_wait_seconds=0.0)
        await room.hold(pinned())

        with pytest.raises(CapacityError) as caught:
            await room.desk.acquire(pinned())

        assert (caught.value.code, caught.value.status) == (ErrorCode.QUEUE_TIMEOUT, 503)
        assert "queue.max_wait_seconds" in caught.value.message
        assert caught.value.retry_after_seconds == 1
        assert room.desk.waiting == 0

    async def test_one_whose_client_left_leaves_the_line(self) -> None:
        room = Room(1)
        held = await room.hold(pinned())
        left, stays = await room.ask(pinned()), await room.ask(pinned())

        await gone(left)
        assert room.desk.waiting == 1
        held.release()

        assert (await stays).slot == S0

    async def test_a_lease_handed_to_one_that_leaves_at_that_moment_goes_to_the_next(self) -> None:
        room = Room(1)
        held = await room.hold(pinned())
        leaves, stays = await room.ask(pinned()), await room.ask(pinned())

        held.release()
        await gone(leaves)

        assert (await stays).slot == S0
        assert room.desk.out == 1

    async def test_a_lease_handed_to_the_last_in_line_that_leaves_is_given_back(self) -> None:
        room = Room(1)
        held = await room.hold(pinned())
        leaves = await room.ask(pinned())

        held.release()
        await gone(leaves)

        assert (room.table.view(S0).is_free, room.desk.out) == (True, 0)

    async def test_one_that_blocked_the_line_and_leaves_lets_the_others_through(self) -> None:
        room = Room()
        await room.hold(pinned())
        blocks, behind = await room.ask(EXCLUSIVE), await room.ask(pinned())
        assert not behind.done()

        await gone(blocks)

        assert (await behind).slot == S1


class TestReturning:
    async def test_giving_back_twice_is_a_bug_and_takes_nothing_from_the_next(self) -> None:
        room = Room(1)
        lease = await room.hold(pinned())
        lease.release()
        following = await room.hold(pinned())

        with pytest.raises(InvariantError, match="was released before"):
            lease.release()
        assert room.table.view(S0).is_leased
        following.release()

    async def test_whoever_looks_after_free_slots_is_told_after_the_line_was_served(self) -> None:
        room = Room(1)
        seen: list[bool] = []
        room.desk._on_change = lambda: seen.append(room.table.view(S0).is_leased)
        held = await room.hold(pinned())
        waiting = await room.ask(pinned())

        held.release()
        assert seen == [True]
        (await waiting).release()
        assert seen == [True, False]

    async def test_slots_that_came_free_by_being_seen_idle_serve_the_line(self) -> None:
        room = Room(1)
        lease = await room.hold(pinned())
        room.table.serve(S0, lease.epoch, None)
        room.table.broke_off(S0, lease.epoch, Settling(S0, was_seen=True))
        lease.release()
        waiting = await room.ask(pinned())
        assert not waiting.done()

        room.table.seen([idle(0)])
        room.desk.changed()

        assert (await waiting).slot == S0

    async def test_the_drain_waits_until_the_last_lease_is_back(self) -> None:
        room = Room()
        one, other = await room.hold(pinned()), await room.hold(pinned())
        drained = asyncio.get_running_loop().create_task(room.desk.until_all_returned())

        one.release()
        await settle()
        assert not drained.done()
        other.release()
        await drained

    async def test_the_drain_does_not_wait_for_leases_of_a_passed_life(self) -> None:
        room = Room()
        await room.hold(pinned())
        drained = asyncio.get_running_loop().create_task(room.desk.until_all_returned())
        await settle()

        room.live(2)
        await drained


class TestVolatile:
    """Where a launch clears every idle slot."""

    def room(self, slots: int = 3) -> Room:
        room = Room(slots)
        room.table.found_volatile()
        return room

    async def test_nothing_is_granted_until_the_request_before_was_seen_to_run(self) -> None:
        room = self.room()
        first = await room.hold(pinned(A))
        second = await room.ask(pinned(B))
        room.table.serve(first.slot, first.epoch, stay(A))
        room.desk.reconsider()
        await settle()
        assert not second.done()
        assert (room.desk.awaits_launch, room.unseen) == (True, 1)

        room.desk.launched(first)

        assert (await second).slot == S1

    async def test_nothing_is_granted_while_an_answer_is_being_saved(self) -> None:
        room = self.room()
        first = await room.run(pinned(A))
        room.table.served(first.slot, first.epoch, stay(A))
        second = await room.ask(pinned(B))
        assert not second.done()
        assert room.desk.try_checkpoint(S0) is None

        first.release()

        assert (await second).slot == S1

    async def test_a_request_departs_only_when_the_answers_that_ended_meanwhile_are_saved(self) -> None:
        room = self.room()
        first = await room.run(pinned(A))
        second = await room.hold(pinned(B))
        room.table.served(first.slot, first.epoch, stay(A))
        departing = asyncio.get_running_loop().create_task(room.desk.depart(second))
        await settle()
        assert not departing.done()

        first.release()
        await departing

        assert second.has_departed

    async def test_one_whose_server_died_departs_at_once(self) -> None:
        room = self.room()
        first = await room.run(pinned(A))
        second = await room.hold(pinned(B))
        room.table.served(first.slot, first.epoch, stay(A))
        departing = asyncio.get_running_loop().create_task(room.desk.depart(second))
        await settle()

        room.live(3)

        await asyncio.wait_for(departing, 1)

    async def test_elsewhere_pinned_requests_do_not_wait_for_each_other(self) -> None:
        room = Room()
        first = await room.run(pinned(A))
        room.table.served(first.slot, first.epoch, stay(A))
        await asyncio.wait_for(room.desk.depart(await room.hold(pinned(B))), 1)


class TestMore:
    async def test_a_floating_request_claims_the_slot_it_was_found_in(self) -> None:
        room = Room()
        busy = await room.run(pinned(A))
        floating = await room.hold(FLOATING)
        assert not room.desk.claim(floating, busy.slot), "somebody has it still"

        room.end(busy)

        assert room.desk.claim(floating, S0)
        assert (floating.slots, room.table.view(S0).is_leased) == ((S1, S0), True)
        assert room.desk.claim(floating, S1)

    async def test_nothing_is_claimed_for_a_lease_of_a_passed_life(self) -> None:
        room = Room()
        floating = await room.hold(FLOATING)
        room.live(2)
        assert not room.desk.claim(floating, S0)

    async def test_who_lacks_room_borrows_all_that_is_free(self) -> None:
        room = Room(3)
        await room.run(pinned(A))
        lease = await room.hold(pinned(B))

        borrowed = room.desk.borrow(lease)

        assert borrowed is not None
        assert borrowed.slots == (S2,)
        assert room.desk.borrow(lease) is None
        borrowed.release()
        assert room.table.view(S2).is_free


class TestSharedMemory:
    """Three slots with room for 1000 tokens together."""

    @pytest.fixture
    def room(self) -> Room:
        room = Room(3)
        room.table.pool = 1000
        return room

    def wanting(self, cells: int, session: SessionKey | None = None) -> Want:
        return Want(Purpose.PINNED, session, cells)

    async def test_what_fits_runs_side_by_side_and_what_does_not_one_after_the_other(
        self, room: Room
    ) -> None:
        first, second = [await room.desk.acquire(self.wanting(400)) for _ in range(2)]
        waiting = asyncio.ensure_future(room.desk.acquire(self.wanting(400)))
        await settle()
        assert not waiting.done()
        first.release()
        assert (await waiting).slots != second.slots

    async def test_one_that_needs_all_there_is_and_more_runs_alone(self, room: Room) -> None:
        first = await room.desk.acquire(self.wanting(100))
        waiting = asyncio.ensure_future(room.desk.acquire(self.wanting(5000)))
        await settle()
        assert not waiting.done()
        first.release()
        (await waiting).release()

    async def test_one_that_waits_for_room_holds_up_those_behind_it_or_it_would_starve(
        self, room: Room
    ) -> None:
        first = await room.desk.acquire(self.wanting(600))
        big = asyncio.ensure_future(room.desk.acquire(self.wanting(900)))
        small = asyncio.ensure_future(room.desk.acquire(self.wanting(100)))
        await settle()
        assert [big.done(), small.done()] == [False, False]
        first.release()
        lease = await big
        (await small).release()
        lease.release()

    async def test_one_that_waits_for_its_own_slot_holds_up_nobody(self, room: Room) -> None:
        room.house(S0, A)
        save = room.desk.try_checkpoint(S0)
        assert save is not None
        own = asyncio.ensure_future(room.desk.acquire(self.wanting(10, A)))
        (await room.desk.acquire(self.wanting(0))).release()
        assert not own.done()
        save.release()
        (await own).release()

    async def test_a_dropped_request_that_still_runs_is_counted_until_it_is_seen_idle(
        self, room: Room
    ) -> None:
        lease = await room.desk.acquire(self.wanting(700))
        room.table.serve(lease.slot, lease.epoch, None)
        room.table.broke_off(lease.slot, lease.epoch, Settling(lease.slot, was_seen=True))
        lease.release()
        waiting = asyncio.ensure_future(room.desk.acquire(self.wanting(400)))
        await settle()
        assert not waiting.done()
        room.table.seen([idle(lease.slot, tokens=20)])
        room.desk.changed()
        (await waiting).release()

    async def test_unpinned_requests_wait_for_room_as_well(self, room: Room) -> None:
        first = await room.desk.acquire(self.wanting(700))
        room.table.serve(first.slot, first.epoch, None)
        room.desk.launched(first)
        waiting = asyncio.ensure_future(room.desk.acquire(Want(Purpose.FLOATING, None, 400)))
        await settle()
        assert not waiting.done()
        room.table.served(first.slot, first.epoch, None, tokens=700)
        first.release()
        (await waiting).release()

    async def test_elsewhere_nobody_waits_for_room(self) -> None:
        room = Room(2)
        for _ in range(2):
            await room.desk.acquire(self.wanting(10**6))

    async def test_one_slot_can_be_borrowed_if_it_is_free(self, room: Room) -> None:
        lease = await room.desk.acquire(self.wanting(10))
        other = SlotId((lease.slot + 1) % 3)
        borrowed = room.desk.borrow(lease, other)
        assert borrowed is not None
        assert borrowed.slots == (other,)
        assert room.desk.borrow(lease, other) is None
        assert room.desk.borrow(lease, lease.slot) is None


class TestFloating:
    async def test_it_holds_all_that_are_free_and_nothing_is_granted_until_it_was_seen_where_it_runs(
        self,
    ) -> None:
        room = Room(3)
        busy = await room.run(pinned())
        floating = await room.hold(FLOATING)
        assert floating.slots == (S1, S2)
        waiting = await room.ask(pinned(A))
        room.end(busy)
        await settle()
        assert not waiting.done(), "slot 0 is free, but the server may take it for the unpinned request"

        floating.narrow((S2,))

        assert (await waiting).slot in (S0, S1)
        assert floating.slot == S2

    async def test_narrowing_to_what_it_holds_already_opens_the_gate(self) -> None:
        room = Room(2)
        busy = await room.run(pinned())
        floating = await room.hold(FLOATING)
        waiting = await room.ask(pinned())
        room.end(busy)

        floating.narrow(floating.slots)

        assert (await waiting).slot == S0

    async def test_it_waits_while_a_slot_is_in_hand_that_the_server_believes_idle(self) -> None:
        room = Room()
        preparing = await room.hold(pinned(A))
        floating = await room.ask(FLOATING)
        assert not floating.done(), "slot 1 is free, but the server may choose slot 0"

        room.table.serve(preparing.slot, preparing.epoch, stay(A))
        room.desk.reconsider()
        await settle()
        assert not floating.done(), "sent, but perhaps not arrived"
        room.desk.launched(preparing)

        assert (await floating).slots == (S1,)

    async def test_a_request_that_begins_no_answer_is_looked_for_where_it_runs(self) -> None:
        room = Room()
        running = await room.hold(pinned(A))
        began = room.clock.now()
        room.table.serve(running.slot, running.epoch, stay(A))
        assert (room.desk.awaits_launch, room.unseen) == (False, 0)
        floating = await room.ask(FLOATING)
        assert room.desk.awaits_launch
        assert room.unseen > 0

        room.clock.advance(1)
        assert not room.table.seen([idle(0), idle(1)], room.clock.now())
        assert not room.table.seen([processing(0), idle(1)], began - 1), "a look from before it was sent"
        assert room.table.seen([processing(0), idle(1)], room.clock.now())
        room.desk.changed()

        assert (await floating).slots == (S1,)
        assert not room.desk.awaits_launch

    async def test_it_waits_for_a_dropped_request_that_may_still_begin(self) -> None:
        room = Room()
        dropped = await room.hold(pinned(A))
        room.table.serve(S0, dropped.epoch, stay(A))
        room.table.broke_off(S0, dropped.epoch, Settling(S0, was_seen=False))
        dropped.release()
        floating = await room.ask(FLOATING)
        assert not floating.done()

        room.table.seen([processing(0), idle(1)])
        room.desk.changed()

        assert (await floating).slots == (S1,)

    async def test_it_can_be_widened_by_what_came_free_since(self) -> None:
        room = Room(3)
        busy = await room.run(pinned())
        floating = await room.hold(FLOATING)
        assert room.desk.widen(floating) == ()
        room.end(busy)

        assert room.desk.widen(floating) == (S0,)

        assert floating.slots == (S1, S2, S0)
        floating.release()
        assert not any(view.is_leased for view in room.table.views())
        assert room.desk.widen(floating) == ()

    async def test_a_slot_taken_beyond_what_it_holds_leaves_it_with_none(self) -> None:
        room = Room(3)
        await room.run(pinned())
        floating = await room.hold(FLOATING)

        floating.narrow((S0,))

        assert floating.slots == ()
        floating.release()

    async def test_whoever_must_not_meet_it_can_wait_until_its_place_is_known(self) -> None:
        room = Room()
        await asyncio.wait_for(room.desk.until_located(), 1)
        floating = await room.hold(FLOATING)
        await asyncio.wait_for(room.desk.until_located(), 1)  # it is still being prepared
        await room.desk.depart(floating)
        waiting = asyncio.get_running_loop().create_task(room.desk.until_located())
        await settle()
        assert not waiting.done()

        floating.narrow((S0,))

        await asyncio.wait_for(waiting, 1)

    async def test_its_end_opens_the_gate(self) -> None:
        room = Room(1)
        floating = await room.hold(FLOATING)
        waiting = await room.ask(pinned())

        floating.release()

        assert (await waiting).slot == S0

    async def test_narrowing_after_the_end_or_in_another_life_does_nothing(self) -> None:
        room = Room()
        ended, void = await room.hold(FLOATING), None
        ended.release()
        ended.narrow((S0,))
        void = await room.hold(FLOATING)
        room.live(2)
        void.narrow((S0,))

        assert [view.is_leased for view in room.table.views()] == [False, False]

    async def test_it_waits_while_no_slot_is_free_and_those_behind_it_wait_too(self) -> None:
        room = Room(1)
        held = await room.hold(pinned())
        floating, behind = await room.ask(FLOATING), await room.ask(pinned())

        held.release()
        await settle()

        assert floating.done()
        assert not behind.done()


class TestExclusive:
    async def test_it_waits_for_all_slots_and_is_not_starved_by_those_who_want_one(self) -> None:
        room = Room()
        one, other = await room.hold(pinned()), await room.hold(pinned())
        exclusive, behind = await room.ask(EXCLUSIVE), await room.ask(pinned())

        one.release()
        await settle()
        assert not behind.done(), "a free slot, but the one before it needs them all"
        other.release()

        lease = await exclusive
        assert lease.slots == (S0, S1)
        assert not behind.done()
        lease.release()
        assert (await behind).slot == S0

    async def test_it_does_not_touch_a_quarantined_slot(self) -> None:
        room = Room()
        room.table.doubt(S1, room.table.epoch)
        exclusive = await room.ask(EXCLUSIVE)
        assert not exclusive.done()

        room.table.fate_known(S1, room.table.epoch)
        room.desk.changed()

        assert len((await exclusive).slots) == 2


class TestCheckpoint:
    async def test_it_takes_a_resident_slot_that_is_free_and_never_waits(self) -> None:
        room = Room()
        room.house(S0, A)

        lease = room.desk.try_checkpoint(S0)

        assert lease is not None
        assert (lease.want, lease.slot) == (Want(Purpose.CHECKPOINT, A), S0)
        assert room.desk.try_checkpoint(S0) is None

    async def test_there_is_nothing_to_save_in_an_empty_slot_or_one_that_is_no_more(self) -> None:
        room = Room()
        assert room.desk.try_checkpoint(S1) is None
        assert room.desk.try_checkpoint(SlotId(7)) is None

    async def test_it_is_refused_while_nothing_is_granted(self) -> None:
        room = Room()
        room.house(S0, A)
        room.desk.suspend()

        assert room.desk.try_checkpoint(S0) is None

    async def test_a_slot_that_nobody_lives_in_can_be_had_while_nothing_is_under_way(self) -> None:
        room = Room(3)
        room.house(S2, A)
        lease = room.desk.try_unused()
        assert lease is not None
        assert lease.slots == (S1,), "the last of them"
        assert room.desk.try_unused() is None, "that one is in use"
        lease.release()
        room.desk.suspend()
        assert room.desk.try_unused() is None

    async def test_where_somebody_lives_everywhere_there_is_none(self) -> None:
        room = Room(1)
        room.house(S0, A)
        assert room.desk.try_unused() is None

    async def test_a_session_waits_for_the_checkpoint_of_its_own_slot(self) -> None:
        room = Room()
        room.house(S0, A)
        lease = room.desk.try_checkpoint(S0)
        assert lease is not None
        room.table.start_saving(S0, lease.epoch)
        waiting = await room.ask(pinned(A))
        assert not waiting.done()

        room.table.save_ended(S0, lease.epoch)
        lease.release()

        assert (await waiting).slot == S0


class TestServersStates:
    async def test_a_new_desk_grants_nothing(self) -> None:
        clock = FakeClock()
        desk = LeaseDesk(SlotTable(clock), clock, max_waiting=1, max_wait_seconds=0.0, on_change=lambda: None)
        assert desk.is_suspended

    async def test_nothing_is_granted_while_it_is_suspended(self) -> None:
        room = Room()
        room.desk.suspend()
        waiting = await room.ask(pinned())
        assert not waiting.done()

        room.desk.resume()

        assert (await waiting).slot == S0

    async def test_a_request_on_its_way_without_a_lease_stops_all_grants(self) -> None:
        room = Room()
        room.desk.stray_began()
        room.desk.stray_began()
        waiting = await room.ask(pinned())

        room.desk.stray_ended()
        await settle()
        assert not waiting.done()
        room.desk.stray_ended()

        assert (await waiting).slot == S0

    async def test_everybody_in_the_line_can_be_sent_away(self) -> None:
        room = Room()
        room.desk.suspend()
        waiting = [await room.ask(pinned()), await room.ask(EXCLUSIVE)]

        room.desk.refuse(UpstreamError("gone", status=503))

        for task in waiting:
            with pytest.raises(UpstreamError, match="gone"):
                await task
        assert room.desk.waiting == 0

    async def test_where_slots_are_no_longer_chosen_whoever_waits_goes_on_without(self) -> None:
        room = Room(1)
        held = await room.hold(pinned())
        waiting = await room.ask(pinned())

        room.desk.stop_pinning()

        with pytest.raises(NotPinned):
            await waiting
        held.release()
        assert room.desk.is_suspended

    async def test_leases_of_a_passed_life_are_void_and_give_nothing_back(self) -> None:
        room = Room()
        old = await room.hold(pinned(A))
        room.live(2)
        assert old.is_void
        new = await room.hold(pinned(B))

        old.release()

        assert (new.slot, room.table.view(S0).is_leased, room.desk.out) == (S0, True, 1)

    async def test_a_gate_that_was_closed_in_a_passed_life_does_not_stay_closed(self) -> None:
        room = Room()
        old = await room.hold(FLOATING)
        room.live(2)

        new = await room.hold(FLOATING)
        old.release()

        waiting = await room.ask(pinned())
        assert not waiting.done(), "the old lease's end does not open the new one's gate"
        new.release()
        await waiting

    async def test_whoever_waited_through_a_restart_is_served_by_the_new_life(self) -> None:
        room = Room(1)
        await room.hold(pinned())
        waiting = await room.ask(pinned(A))

        room.live(2)

        lease = await waiting
        assert (lease.epoch, lease.is_void) == (2, False)

    async def test_it_can_be_read_by_a_person(self) -> None:
        room = Room(1)
        await room.hold(FLOATING)
        room.desk.suspend()
        assert repr(room.desk) == (
            "<LeaseDesk 1 out, 0 waiting gate closed suspended <SlotTable epoch 1 [0:idle*]>>"
        )


class WatchedTable(SlotTable):
    """Judges each grant at the moment it is made."""

    desk: LeaseDesk

    def hold(self, slots: Any, holder: int, claim: int = 0, worst: int = 0) -> None:
        held = list(slots)
        assert held, "a lease of nothing"
        assert not self.desk.is_suspended
        assert self.desk._gate is None
        assert self.desk._strays == 0
        assert not (self.is_volatile and any(view.is_in_hand for view in self.views()))
        for slot in held:
            view = self.view(slot)
            assert not view.is_leased
            assert view.state in (SlotState.IDLE, SlotState.RESIDENT, SlotState.QUARANTINED)
        if self.pool is not None and claim:
            assert may_run(self.pool, claim, held, self.views())
        super().hold(held, holder, claim, worst)


SESSIONS = st.sampled_from([None, A, B, C])
POOL = 1000
CELLS = st.sampled_from([0, 400, 700, 5 * POOL])
WANTS = st.one_of(st.builds(pinned, SESSIONS, CELLS), st.sampled_from([FLOATING, EXCLUSIVE]))
ANY = st.integers(0, 1_000)


class Machine(RuleBasedStateMachine):
    """Anything that may happen at the desk, in any order; a rule ends when every task has come to rest."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        clock = FakeClock()
        self.table = WatchedTable(clock)
        self.desk = LeaseDesk(
            self.table, clock, max_waiting=100, max_wait_seconds=1e6, on_change=lambda: None
        )
        self.table.desk = self.desk
        self.waiting: list[asyncio.Task[Lease]] = []
        self.out: list[Lease] = []
        self.late: list[tuple[SlotId, int]] = []
        self.strays = 0

    @initialize(slots=st.integers(1, 4))
    def begin(self, slots: int) -> None:
        self._live(slots)

    def _live(self, slots: int) -> None:
        self.table.begin_epoch(slots)
        self.desk.epoch_began()
        self.late.clear()
        self.table.seen([idle(n) for n in range(slots)])
        self.desk.resume()
        self._rest()

    def _rest(self) -> None:
        self.loop.run_until_complete(settle(4))
        self.out += [task.result() for task in self.waiting if task.done()]
        self.waiting = [task for task in self.waiting if not task.done()]

    def _live_leases(self) -> list[Lease]:
        return [lease for lease in self.out if not lease.is_void]

    @rule(want=WANTS)
    def ask(self, want: Want) -> None:
        self.waiting.append(self.loop.create_task(self.desk.acquire(want)))
        self._rest()

    @precondition(lambda self: self.waiting)
    @rule(which=ANY)
    def leave(self, which: int) -> None:
        self._leave(self.waiting.pop(which % len(self.waiting)))
        self._rest()

    def _leave(self, task: asyncio.Task[Lease]) -> None:
        if not task.cancel():  # it was served just before
            self.out.append(task.result())
            return
        self.loop.run_until_complete(asyncio.wait([task]))
        assert task.cancelled()

    @precondition(lambda self: self.out)
    @rule(which=ANY)
    def serve(self, which: int) -> None:
        lease = self.out[which % len(self.out)]
        if lease.is_void or self.table.view(lease.slots[0]).state is SlotState.SERVING:
            return
        for slot in lease.slots:
            session = lease.want.session
            homes = session and self.table.slot_of(session)
            lives_elsewhere = lease.is_fork or (homes is not None and homes and homes.id != slot)
            self.table.serve(slot, lease.epoch, stay(session) if session and not lives_elsewhere else None)
        self.desk.reconsider()
        self._rest()

    @precondition(lambda self: self.out)
    @rule(which=ANY)
    def begin_to_answer(self, which: int) -> None:
        lease = self.out[which % len(self.out)]
        if len(lease.slots) == 1 and not lease.is_void:
            self.desk.launched(lease)
        self._rest()

    @precondition(lambda self: self.out)
    @rule(which=ANY, is_dropped=st.booleans())
    def give_back(self, which: int, is_dropped: bool) -> None:
        self._give_back(self.out.pop(which % len(self.out)), is_dropped)
        self._rest()

    @precondition(lambda self: self.out and self.waiting)
    @rule(which=ANY, who=ANY)
    def leave_at_the_moment_of_the_grant(self, which: int, who: int) -> None:
        self._give_back(self.out.pop(which % len(self.out)), is_dropped=False)
        self._leave(self.waiting.pop(who % len(self.waiting)))
        self._rest()

    def _give_back(self, lease: Lease, is_dropped: bool) -> None:
        for slot in lease.slots if not lease.is_void else ():
            view = self.table.view(slot)
            if view.state is SlotState.SERVING and is_dropped:
                self.table.broke_off(slot, lease.epoch, Settling(slot, was_seen=True))
            elif view.state is SlotState.SERVING:
                self.table.served(slot, lease.epoch, view.occupancy)
        lease.release()

    @precondition(lambda self: any(x.want == FLOATING for x in self._live_leases()))
    @rule(which=ANY)
    def see_where_it_runs(self, which: int) -> None:
        floating = [lease for lease in self._live_leases() if lease.want == FLOATING]
        lease = floating[which % len(floating)]
        idle_ones = [s for s in lease.slots if self.table.view(s).state is not SlotState.SERVING]
        lease.narrow(tuple(s for s in lease.slots if s not in idle_ones[1:]))
        self._rest()

    @rule(slot=st.integers(0, 4))
    def checkpoint(self, slot: int) -> None:
        lease = self.desk.try_checkpoint(SlotId(slot))
        if lease is not None:
            self.out.append(lease)
        self._rest()

    @precondition(lambda self: self._live_leases())
    @rule(which=ANY)
    def doubt(self, which: int) -> None:
        leases = self._live_leases()
        slot = leases[which % len(leases)].slots[0]
        if self.table.view(slot).state is SlotState.IDLE:
            self.table.doubt(slot, self.table.epoch)
            self.late.append((slot, self.table.epoch))

    @precondition(lambda self: self.late)
    @rule()
    def learn_a_fate(self) -> None:
        slot, epoch = self.late.pop()
        self.table.fate_known(slot, epoch)  # type: ignore[arg-type]
        self.desk.changed()
        self._rest()

    @rule()
    def look(self) -> None:
        if self.table.seen([idle(view.id) for view in self.table.views()]):
            self.desk.changed()
        self._rest()

    @rule()
    def find_it_volatile(self) -> None:
        self.table.found_volatile()

    @rule()
    def find_its_memory_shared(self) -> None:
        self.table.pool = POOL

    @rule()
    def suspend(self) -> None:
        self.desk.suspend()

    @rule()
    def resume(self) -> None:
        self.desk.resume()
        self._rest()

    @rule(slots=st.integers(1, 4))
    def restart(self, slots: int) -> None:
        self._live(slots)

    @rule()
    def stray(self) -> None:
        self.strays += 1
        self.desk.stray_began()

    @precondition(lambda self: self.strays)
    @rule()
    def stray_ends(self) -> None:
        self.strays -= 1
        self.desk.stray_ended()
        self._rest()

    @invariant()
    def no_slot_has_two_leases_and_none_is_held_by_nobody(self) -> None:
        held = [slot for lease in self._live_leases() for slot in lease.slots]
        assert len(held) == len(set(held))
        assert set(held) == {view.id for view in self.table.views() if view.is_leased}

    @invariant()
    def every_waiter_is_in_the_line_and_every_lease_is_out(self) -> None:
        assert self.desk.waiting == len(self.waiting)
        assert self.desk.out == len(self._live_leases())

    @invariant()
    def a_slot_that_is_free_has_no_waiter_who_would_take_any(self) -> None:
        first = next(iter(self.desk._line), None)
        is_open = not (self.desk.is_suspended or self.desk._gate or self.strays)
        if first is not None and is_open and first.want in (pinned(None), FLOATING):
            views = self.table.views()
            is_careful = first.want == FLOATING or self.table.is_volatile
            waits_for_others = is_careful and any(view.is_in_hand for view in views)
            waits_for_room = self.table.pool is not None and not all(view.is_free for view in views)
            assert waits_for_others or waits_for_room or not any(view.is_free for view in views)

    @invariant()
    def whoever_is_first_in_line_is_served_once_all_slots_are_free_however_much_it_needs(self) -> None:
        is_open = not (self.desk.is_suspended or self.desk._gate or self.strays)
        if is_open and all(view.is_free for view in self.table.views()):
            assert not self.desk.waiting

    @invariant()
    def a_floating_request_whose_place_is_not_known_can_meet_nobody(self) -> None:
        gate = self.desk._gate
        if gate is not None and not gate.is_void:
            others = (view for view in self.table.views() if view.id not in gate.slots)
            assert not any(view.is_in_hand for view in others)

    def teardown(self) -> None:
        try:
            for task in self.waiting:
                self._leave(task)
            for lease in self.out:
                lease.release()
            assert not any(view.is_leased for view in self.table.views())
            assert self.desk.out == self.desk.waiting == 0
        finally:
            self.loop.close()


TestAnything = Machine.TestCase
TestAnything.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class TestWaiting:
    async def test_only_who_has_to_wait_is_told_so(self) -> None:
        room, told = Room(1), []
        lease = await room.desk.acquire(pinned(A), lambda: told.append("A"))
        assert told == []
        waiting = asyncio.get_running_loop().create_task(
            room.desk.acquire(pinned(B), lambda: told.append("B"))
        )
        await settle(2)
        assert told == ["B"]
        lease.release()
        (await waiting).release()

    async def test_a_part_of_a_lease_is_the_right_to_one_of_its_slots(self) -> None:
        room = Room(2)
        lease = await room.hold(FLOATING)
        assert (lease.part(S1).slot, lease.part(S1).epoch, lease.slots) == (S1, lease.epoch, (S0, S1))

    async def test_who_departs_anew_lets_the_end_of_another_be_saved_first(self) -> None:
        """It had departed, and found more to do. The other waits to know where it runs, and is waited for."""
        room = Room(2)
        other = await room.run(pinned(A))
        lease = await room.hold(FLOATING)
        await room.desk.depart(lease)
        room.table.served(other.slot, other.epoch, stay(A))
        saving = asyncio.get_running_loop().create_task(room.desk.until_located())
        await settle()
        assert not saving.done()

        departing = asyncio.get_running_loop().create_task(room.desk.depart(lease))
        await settle()
        assert saving.done()
        assert not departing.done()

        other.release()
        await departing
        assert lease.has_departed
        lease.release()
