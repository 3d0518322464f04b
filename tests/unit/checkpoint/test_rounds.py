from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvproxy.checkpoint import rounds as module
from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.checkpoint.policy import CheckpointPolicy
from kvproxy.checkpoint.rounds import LOST_SERVER_SECONDS, Flushed, Rounds
from kvproxy.identifiers import SlotId
from kvproxy.slots.leases import Purpose, Want
from kvproxy.snapshots.files import FileCheck
from kvproxy.telemetry.events import CheckpointStarted
from kvproxy.upstream.replies import ActionFailure, Fault, Saved
from tests.support.fakes_core import A, B, C, World, settle, stay

S0, S1 = SlotId(0), SlotId(1)
FAILED = ActionFailure(Fault.FAILED, "HTTP 500", 500)
O = CheckpointOutcome  # noqa: E741


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_LOOK_SECONDS", 0.0)


class Room(World):
    def __init__(self, *, slots: int = 2, policy: CheckpointPolicy | None = None) -> None:
        super().__init__(slots=slots, policy=policy, max_failures=100)
        self.rounds = Rounds(
            self.table,
            self.desk,
            self.checkpointer,
            self.policy,
            self.actions.save_seconds,
            self.clock,
            self.confirm,
        )

    def triggers(self) -> list[tuple[int, Trigger]]:
        return [(event.slot, event.trigger) for event in self.sink.of(CheckpointStarted)]


class TestRound:
    async def test_it_saves_what_is_due_and_nothing_else(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.clock.advance(30)
        room.house(1, stay(B))

        await room.rounds.run_once()

        assert room.triggers() == [(0, Trigger.IDLE)]

    async def test_a_second_round_finds_nothing_left(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.clock.advance(30)

        await room.rounds.run_once()
        await room.rounds.run_once()

        assert len(room.triggers()) == 1

    async def test_a_checkpoint_that_came_to_nothing_is_not_tried_again_at_once(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.clock.advance(30)
        room.server.answer("save", FAILED)

        await room.rounds.run_once()
        await room.rounds.run_once()
        assert len(room.triggers()) == 1
        room.clock.advance(1)
        await room.rounds.run_once()
        assert len(room.triggers()) == 2

    async def test_a_slot_that_holds_too_little_is_written_out_more_and_more_seldom(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.clock.advance(30)
        room.server.answer("save", Saved(10, 5000))

        for _ in range(60):
            await room.rounds.run_once()
            room.clock.advance(1)

        assert len(room.triggers()) == 6, "after 0, 1, 3, 7, 15 and 31 seconds"

    async def test_and_as_ever_once_it_holds_something_else(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.clock.advance(30)
        room.server.answer("save", Saved(10, 5000))
        for _ in range(20):
            await room.rounds.run_once()
            room.clock.advance(1)
        tried = len(room.triggers())

        room.house(0, stay(A, revision=2))
        room.clock.advance(30)
        for _ in range(2):
            await room.rounds.run_once()
            room.clock.advance(1)

        assert len(room.triggers()) == tried + 2

    async def test_a_server_that_has_fallen_asleep_meanwhile_is_not_woken_by_a_save(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.clock.advance(30)
        room.on_confirm = room.live

        await room.rounds.run_once()

        assert room.triggers() == []
        assert room.log == []

    async def test_under_pressure_the_next_victim_is_saved_ahead(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.clock.advance(5)
        room.table.lose(S0, room.table.epoch)
        room.house(0, stay(A))
        room.clock.advance(5)
        room.house(1, stay(B))

        await room.rounds.run_once()

        assert room.triggers() == [(0, Trigger.SWITCH)]

    async def test_it_wakes_when_a_slot_comes_free_that_is_due(self) -> None:
        room = Room(policy=CheckpointPolicy(max_unsaved_tokens=5))
        running = asyncio.get_running_loop().create_task(room.rounds.run())
        await settle()
        room.house(0, stay(A))

        room.rounds.slots_changed()
        await settle()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        assert room.triggers() == [(0, Trigger.AGE)]

    async def test_a_turn_that_ended_while_a_save_was_published_is_as_young_as_it_is(self) -> None:
        """Else a loop that never pauses would be saved twice each time it is dirty for long enough."""
        room = Room(policy=CheckpointPolicy(on_idle_seconds=0, max_dirty_seconds=10))
        on_disk: asyncio.Future[FileCheck] = asyncio.get_running_loop().create_future()
        room.files.durable = on_disk
        room.house(0, replace(stay(A), dirty_since=room.clock.now()))
        room.clock.advance(10)
        saving = asyncio.ensure_future(room.rounds.run_once())
        await settle()
        occupancy = room.table.view(S0).occupancy
        assert occupancy is not None
        later = occupancy.changed(room.clock.now(), 1010, 10)
        room.table.serve(S0, room.table.epoch, occupancy)
        room.table.served(S0, room.table.epoch, later)

        on_disk.set_result(FileCheck())
        await saving

        assert room.triggers() == [(0, Trigger.AGE)]
        room.clock.advance(9.9)
        await room.rounds.run_once()
        assert len(room.triggers()) == 1
        room.clock.advance(0.1)
        await room.rounds.run_once()
        assert len(room.triggers()) == 2


class TestSaveSlot:
    async def test_a_slot_that_somebody_holds_is_busy(self) -> None:
        room = Room()
        room.house(0, stay(A))
        await room.desk.acquire(Want(Purpose.PINNED, A))

        assert (await room.rounds.save_slot(S0, Trigger.MANUAL)).outcome is O.BUSY

    async def test_a_save_in_flight_is_joined_and_the_slot_saved_once(self) -> None:
        room = Room()
        room.house(0, stay(A))
        gate: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
        room.server.answer("save", gate)
        first = asyncio.ensure_future(room.rounds.save_slot(S0, Trigger.IDLE))
        await settle()
        second = asyncio.ensure_future(room.rounds.save_slot(S0, Trigger.MANUAL))
        await settle()
        gate.set_result(Saved(1000, 5000))

        assert await first == await second
        assert len(room.triggers()) == 1
        assert room.desk.out == 0

    async def test_a_slot_of_a_server_that_has_fewer_by_now_is_busy(self) -> None:
        assert (await Room(slots=1).rounds.save_slot(S1, Trigger.MANUAL)).outcome is O.BUSY


class TestSaveSession:
    async def test_a_session_that_lives_nowhere_has_nothing_to_save(self) -> None:
        assert (await Room().rounds.save_session(A, 5.0)).outcome is O.CLEAN

    async def test_its_request_is_waited_for(self) -> None:
        room = Room()
        room.house(0, stay(A))
        lease = await room.desk.acquire(Want(Purpose.PINNED, A))
        saving = asyncio.ensure_future(room.rounds.save_session(A, 5.0))
        await settle()
        assert not saving.done()

        lease.release()

        assert (await saving).outcome is O.PUBLISHED

    async def test_not_for_longer_than_granted(self) -> None:
        room = Room()
        room.house(0, stay(A))
        await room.desk.acquire(Want(Purpose.PINNED, A))

        assert (await room.rounds.save_session(A, 0.0)).outcome is O.BUSY


class TestFlush:
    async def flush(self, room: Room, *, wait: bool = False, seconds: float = 10.0) -> Flushed:
        return await room.rounds.flush(Trigger.SHUTDOWN, seconds, wait_for_requests=wait)

    async def test_every_dirty_slot_is_saved(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.house(1, stay(B))

        assert await self.flush(room) == Flushed(2, 0)
        assert room.triggers() == [(0, Trigger.SHUTDOWN), (1, Trigger.SHUTDOWN)]

    async def test_there_may_be_nothing_to_save(self) -> None:
        assert await self.flush(Room()) == Flushed()

    async def test_who_comes_into_a_slot_that_was_saved_is_saved_too(self) -> None:
        room = Room(slots=2)
        room.house(0, stay(A))
        room.house(1, stay(C))

        def another() -> Saved:
            """While slot 1 is saved, B takes over slot 0, as many turns old as A was."""
            room.house(0, stay(B))
            return Saved(1000, 5000)

        room.server.answer("save", Saved(1000, 5000), another, Saved(1000, 5000))

        flushed = await self.flush(room)

        assert flushed == Flushed(3, 0)
        assert not room.table.has_dirty

    async def test_a_save_that_fails_is_counted_and_not_tried_again(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.house(1, stay(B))
        room.server.answer("save", FAILED, Saved(1000, 5000))

        assert await self.flush(room) == Flushed(1, 1)
        assert len(room.triggers()) == 2

    async def test_it_does_not_wait_for_those_that_serve_unless_asked_to(self) -> None:
        room = Room()
        room.house(0, stay(A))
        lease = await room.desk.acquire(Want(Purpose.PINNED, A))
        room.table.serve(S0, lease.epoch, stay(A))

        assert await self.flush(room) == Flushed()
        waiting = asyncio.ensure_future(self.flush(room, wait=True))
        await settle()
        room.table.served(S0, lease.epoch, replace(stay(A), revision=stay(A, revision=2).revision))
        lease.release()

        assert await waiting == Flushed(1, 0)

    async def test_asked_to_wait_it_waits_until_it_is_known_where_a_request_ran(self) -> None:
        """Its answer may be over: what it left has no slot yet."""
        room = Room()
        room.house(0, stay(A))
        lease = await room.desk.acquire(Want(Purpose.FLOATING, A))

        waiting = asyncio.ensure_future(self.flush(room, wait=True))
        await settle()
        assert not waiting.done()
        lease.release()

        assert await waiting == Flushed(1, 0)

    async def test_with_nothing_dirty_it_waits_for_such_a_request_all_the_same(self) -> None:
        room = Room()
        lease = await room.desk.acquire(Want(Purpose.FLOATING, A))
        waiting = asyncio.ensure_future(self.flush(room, wait=True))
        await settle()
        room.table.take(S0, lease.epoch, stay(A))
        room.table.served(S0, lease.epoch, stay(A))
        lease.release()

        assert await waiting == Flushed(1, 0)

    async def test_no_time_means_no_save(self) -> None:
        room = Room()
        room.house(0, stay(A))
        await self.flush(room, seconds=0.0)
        assert room.triggers() == []

    async def test_a_server_that_is_lost_is_not_waited_for_until_the_end(self) -> None:
        room = Room()
        room.house(0, stay(A))
        room.desk.suspend()
        flushing = asyncio.ensure_future(self.flush(room, seconds=1e6))
        await settle()
        assert not flushing.done()

        room.clock.advance(LOST_SERVER_SECONDS)

        assert await flushing == Flushed(0, 1)
