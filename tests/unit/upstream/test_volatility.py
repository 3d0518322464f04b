from __future__ import annotations

from typing import Any, cast

from kvproxy.identifiers import Epoch, SlotId
from kvproxy.slots.leases import Purpose, Want
from kvproxy.telemetry.events import TaskDied
from kvproxy.upstream.replies import SlotInfo
from kvproxy.upstream.volatility import Volatility
from tests.support.fakes_core import UNREACHABLE, A, B, World, idle, settle, stay

S0, S1 = SlotId(0), SlotId(1)


class Room(World):
    """Session A lived in slot 0 before a request ran in slot 1."""

    def __init__(self) -> None:
        super().__init__()
        self.proofs = 0
        self.crowds: list[Epoch] = []
        self.looks: list[float] = []
        self.volatility = Volatility(
            cast(Any, self.server),
            self.table,
            self.standing,
            self.tasks,
            self.clock,
            on_proof=self._proved,
            on_crowd=self._crowded,
            on_look=lambda infos, asked_at: self.looks.append(asked_at),
        )
        self.house(0, stay(A))
        self.clock.advance(1)
        self.began = self.clock.now()

    def _crowded(self, epoch: Epoch, shares: bool) -> None:
        assert shares
        self.crowds.append(epoch)

    def _proved(self) -> None:
        self.proofs += 1

    async def request(self, *infos: SlotInfo) -> int:
        """How often the server was looked at after a request in slot 1."""
        self.log.clear()
        self.server.answer("slots", infos)
        self.volatility.request_ended(S1, self.began)
        await settle()
        return self.log.count("slots")


async def test_a_slot_that_was_cleared_when_another_started_is_the_proof() -> None:
    room = Room()
    assert await room.request(idle(0, tokens=0), idle(1, tokens=9)) == 1
    assert room.proofs == 1


async def test_a_slot_that_still_holds_its_tokens_settles_it_for_this_life() -> None:
    room = Room()
    assert await room.request(idle(0, tokens=1000), idle(1)) == 1
    assert await room.request(idle(0, tokens=0), idle(1)) == 0
    assert room.proofs == 0


async def test_each_life_of_the_server_is_looked_at() -> None:
    room = Room()
    await room.request(idle(0, tokens=1000), idle(1))
    room.live(2)
    room.house(0, stay(A))
    room.clock.advance(1)
    room.began = room.clock.now()

    assert await room.request(idle(0, tokens=0), idle(1)) == 1
    assert room.proofs == 1


async def test_without_a_witness_nobody_looks() -> None:
    room = Room()
    room.house(0, stay(A, tokens=None))  # what it holds is not known
    assert await room.request(idle(0, tokens=0)) == 0

    room.house(0, stay(A))  # used after the request began
    assert await room.request(idle(0, tokens=0)) == 0


async def test_a_slot_that_somebody_holds_is_no_witness() -> None:
    room = Room()
    await room.desk.acquire(Want(Purpose.PINNED, A))
    assert await room.request(idle(0, tokens=0)) == 0


async def test_the_slot_of_the_request_itself_is_no_witness() -> None:
    room = Room()
    room.table.lose(S0, room.table.epoch)
    room.house(1, stay(B))
    room.clock.advance(1)
    room.began = room.clock.now()
    assert await room.request(idle(0), idle(1, tokens=0)) == 0


async def test_a_count_that_the_server_does_not_tell_proves_nothing_and_is_asked_for_again() -> None:
    room = Room()
    await room.request(idle(0, tokens=None), idle(1))
    assert await room.request(idle(0, tokens=0), idle(1)) == 1
    assert room.proofs == 1


async def test_a_server_that_does_not_answer_proves_nothing() -> None:
    room = Room()
    room.server.answer("slots", UNREACHABLE)
    room.volatility.request_ended(S1, room.began)
    await settle()
    assert room.proofs == 0


async def test_a_witness_that_was_used_during_the_look_proves_nothing() -> None:
    room = Room()

    def meanwhile() -> tuple[SlotInfo, ...]:
        room.house(0, stay(B))
        return (idle(0, tokens=0), idle(1))

    room.server.answer("slots", meanwhile)
    room.volatility.request_ended(S1, room.began)
    await settle()
    assert room.proofs == 0


async def test_a_look_into_another_life_that_has_fewer_slots_proves_nothing() -> None:
    room = Room()
    room.house(1, stay(B))
    room.clock.advance(1)

    def meanwhile() -> tuple[SlotInfo, ...]:
        room.live(1)
        return (idle(0, tokens=0), idle(1, tokens=0))

    room.server.answer("slots", meanwhile)
    room.volatility.request_ended(S0, room.clock.now())
    await settle()
    assert (room.proofs, room.sink.of(TaskDied)) == (0, [])


async def test_one_look_at_a_time_is_enough() -> None:
    room = Room()
    room.server.answer("slots", (idle(0, tokens=5), idle(1)))
    for _ in range(3):
        room.volatility.request_ended(S1, room.began)
    await settle()
    assert room.log == ["slots"]


async def test_each_look_is_shown_to_whoever_watches_for_others() -> None:
    room = Room()
    await room.request(idle(0, tokens=1000), idle(1))
    assert room.looks == [room.clock.now()]


class TestCrowd:
    """Slots hold more together than one of them may: what was emptied, was so for want of room."""

    def crowded(self) -> Room:
        room = Room()
        room.house(1, stay(B, tokens=3500))
        return room

    async def test_a_slot_that_was_emptied_for_room_is_no_proof_but_of_a_shared_memory(self) -> None:
        room = self.crowded()
        await room.request(idle(0, tokens=0), idle(1, tokens=3500))
        assert (room.proofs, room.crowds) == (0, [room.table.epoch])

    async def test_one_that_kept_its_tokens_all_the_same_settles_nothing(self) -> None:
        room = self.crowded()
        await room.request(idle(0, tokens=1000), idle(1, tokens=3500))
        assert await room.request(idle(0, tokens=1000), idle(1)) == 1

    def test_a_look_made_for_another_reason_is_judged_as_well(self) -> None:
        crowded, cleared, kept = self.crowded(), Room(), Room()
        for room, tokens in ((crowded, 0), (cleared, 0), (kept, 1000)):
            room.clock.advance(1)
            room.volatility.judge((idle(0, tokens=tokens), idle(1)), room.clock.now())
        assert (crowded.proofs, len(crowded.crowds)) == (0, 1)
        assert (cleared.proofs, cleared.crowds) == (1, [])
        assert (kept.proofs, kept.crowds) == (0, [])

    def test_a_look_from_before_the_slot_was_used_judges_nothing(self) -> None:
        room = Room()
        room.volatility.judge((idle(0, tokens=0), idle(1)), room.clock.now() - 2)
        assert room.proofs == 0
