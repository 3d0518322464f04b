from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from kvproxy.boundary.turn import Asked
from kvproxy.checkpoint.outcome import Outcome, Preparation, Reason
from kvproxy.dialects.reading import Reading, read
from kvproxy.errors import ErrorCode, ReplyError
from kvproxy.identifiers import Revision, SlotId
from kvproxy.proxy.recogniser import Owner
from kvproxy.proxy.steering import NOWHERE, Aim, Steering
from kvproxy.sessions.session import Session
from kvproxy.slots.leases import Lease, LeaseDesk, Purpose, Want
from kvproxy.slots.state import SlotState
from kvproxy.slots.table import SlotTable
from kvproxy.upstream.replies import Completed, Obstacle, Unavailable
from tests.support.clock import FakeClock
from tests.support.fakes_core import A, B, idle, stay

S0, S1 = SlotId(0), SlotId(1)
NEW = Preparation(Outcome.COLD, Reason.NEW_SESSION)
RESTORED = Preparation(Outcome.RESTORED, restored_tokens=7)
FAILED = ReplyError(ErrorCode.RESTORE_FAILED, "no", status=503)
HELLO = read("messages", {"messages": [{"role": "user", "content": "hello"}]})


@dataclass(frozen=True, slots=True)
class Calls:
    """What steering needs of a call."""

    reading: Reading | None
    asked: Asked | None = None


class Prepares:
    """A preparer that restores what is stored, and saves nobody of `unsaved`."""

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self.stored = False
        self.refuses = False
        self.unsaved: set[SlotId] = set()
        self.asked: list[SlotId] = []
        self.starts_over: bool | None = None
        """Whether a slot of which nothing may be used can be emptied; None where it may be."""
        self.started_over: list[SlotId] = []

    async def start_over(self, lease: Lease) -> bool:
        self.started_over.append(lease.slot)
        self.table.lose(lease.slot, lease.epoch)
        return bool(self.starts_over)

    def has_stored(self, _: Session) -> bool:
        return self.stored

    def is_at_risk(self, slot: SlotId) -> bool:
        return self.table.view(slot).id in self.unsaved

    def leave_cold(self, *_: object) -> Preparation:
        return NEW

    def at_once(self, lease: Lease, session: Session) -> Preparation | None:
        at_home = self.table.view(lease.slot).occupant == session.key and self.starts_over is None
        return Preparation(Outcome.RESIDENT) if at_home else None

    async def prepare(self, lease: Lease, session: Session, asked: Asked | None) -> Preparation | ReplyError:
        self.asked.append(lease.slot)
        if self.starts_over is not None:
            return Preparation(Outcome.COLD, Reason.PREFIX_DIVERGED, from_scratch=True)
        session.asked = None  # nobody needs it from here on, for all that it knows
        if self.refuses:
            return FAILED
        if not self.stored:
            return NEW
        if self.table.view(lease.slot).occupancy is not None:
            self.table.lose(lease.slot, lease.epoch)
        self.table.start_restoring(lease.slot, lease.epoch)
        self.table.restored(lease.slot, lease.epoch, stay(session.key))
        return RESTORED


class Computes:
    """A server with one token for each byte."""

    def __init__(self, answer: Completed | Unavailable) -> None:
        self.answer = answer
        self.prefilled: list[tuple[SlotId, int]] = []

    async def apply_template(self, *_: object) -> str:
        return "hello"

    async def tokenize(self, text: str, *_: object, **__: object) -> tuple[int, ...]:
        return tuple(text.encode())

    async def complete(self, slot: SlotId, *_: object, n_predict: int, **__: object) -> object:
        self.prefilled.append((slot, n_predict))
        return self.answer


class Knows:
    """A recogniser that is told where a request runs."""

    def __init__(self) -> None:
        self.branch: Session | None = None
        self.at_home = 0

    def runs_at_home(self, _: Owner) -> None:
        self.at_home += 1

    def runs_elsewhere(self, _: Owner) -> Session | None:
        return self.branch


class Room:
    def __init__(self, *, is_exact: bool = False, answer: Completed | Unavailable | None = None) -> None:
        self.clock = FakeClock()
        self.table = SlotTable(self.clock)
        self.desk = LeaseDesk(
            self.table, self.clock, max_waiting=1, max_wait_seconds=1, on_change=lambda: None
        )
        self.table.begin_epoch(2)
        self.desk.epoch_began()
        self.table.seen([idle(0), idle(1)])
        self.desk.resume()
        self.preparer = Prepares(self.table)
        self.client = Computes(answer or Completed(5, 0))
        self.spawned: list[str] = []
        self.recogniser = Knows()
        self.steering = Steering(
            self.desk,
            cast(Any, self.preparer),
            cast(Any, None),
            cast(Any, self.recogniser),
            cast(Any, self.client),
            cast(Any, self),
            is_exact,
        )
        self.session = Session(A, "digest", "model", 0.0, Revision(3))
        self.reading: Reading | None = HELLO

    def spawn(self, work: Any, *, name: str) -> None:
        work.close()
        self.spawned.append(name)

    async def aim(self) -> Aim | ReplyError:
        lease = await self.desk.acquire(Want(Purpose.FLOATING, A))
        return await self.steering.aim(lease, Owner(self.session, cast(Any, Calls(self.reading)), "model"))

    def house(self, slot: SlotId, session: Any) -> None:
        self.table.serve(slot, self.table.epoch, stay(session))
        self.table.served(slot, self.table.epoch, stay(session))


async def test_a_conversation_at_home_is_expected_there() -> None:
    room = Room()
    room.house(S1, A)
    aim = await room.aim()
    assert aim == Aim(Preparation(Outcome.RESIDENT), room.session, S1, room.table.view(S1).occupancy)
    assert room.recogniser.at_home == 1


async def test_a_stored_one_is_brought_into_the_slot_that_is_missed_least() -> None:
    room = Room()
    room.house(S0, B)
    room.preparer.stored = True
    assert await room.aim() == Aim(RESTORED, room.session, S1, room.table.view(S1).occupancy)
    assert room.preparer.asked == [S1]
    assert room.table.view(S0).occupant == B


async def test_for_a_new_one_nobody_has_to_leave_before_the_server_has_chosen() -> None:
    room = Room()
    room.house(S0, B)
    aim = await room.aim()
    assert isinstance(aim, Aim)
    assert (aim.preparation, aim.slot, aim.tokens) == (NEW, None, None)
    assert aim.stay is not None
    assert aim.stay.session == A
    assert room.preparer.asked == []


async def beside(room: Room) -> Aim | ReplyError:
    """The aim of a second request of the conversation."""
    room.house(S1, A)
    lease = await room.desk.acquire(Want(Purpose.PINNED, A))
    room.table.serve(lease.slot, lease.epoch, stay(A))
    room.desk.launched(lease)
    return await room.aim()


async def test_beside_another_request_of_its_own_it_owns_nothing_if_it_says_too_little() -> None:
    room = Room()
    assert await beside(room) == Aim(Preparation(Outcome.COLD, Reason.SESSION_BUSY))
    assert room.recogniser.at_home == 0


async def test_beside_another_request_of_its_own_it_begins_a_branch() -> None:
    room = Room()
    room.recogniser.branch = Session(B, "digest", "model", 0.0, Revision(0))
    aim = await beside(room)
    assert isinstance(aim, Aim)
    assert (aim.preparation.reason, aim.slot) == (Reason.SESSION_BUSY, None)
    assert aim.session is room.recogniser.branch
    assert aim.stay is not None
    assert aim.stay.session == B


async def test_a_refusal_of_the_preparer_is_passed_on() -> None:
    room = Room()
    room.preparer.stored = room.preparer.refuses = True
    assert await room.aim() is FAILED


async def test_exactly_steered_the_prompt_is_computed_there_before() -> None:
    room = Room(is_exact=True)
    aim = await room.aim()
    assert isinstance(aim, Aim)
    assert (aim.preparation, aim.slot, aim.computed) == (NEW, S0, Completed(5, 0))
    assert room.client.prefilled == [(S0, 0)]


async def test_a_prompt_that_may_still_be_computing_makes_its_slot_doubtful() -> None:
    room = Room(is_exact=True, answer=Unavailable(Obstacle.UNREACHABLE, "it broke"))
    aim = await room.aim()
    assert isinstance(aim, Aim)
    assert (aim.slot, aim.computed) == (None, None)
    assert room.table.view(S0).state is SlotState.QUARANTINED
    assert room.spawned == ["see a prefill end"]


async def test_a_prompt_that_cannot_be_rendered_is_left_to_the_server() -> None:
    room = Room(is_exact=True)
    room.reading = None
    aim = await room.aim()
    assert isinstance(aim, Aim)
    assert (aim.slot, aim.computed, room.client.prefilled) == (None, None, [])


async def test_a_new_one_is_kept_out_of_the_slot_of_somebody_who_could_not_be_saved() -> None:
    room = Room()
    room.house(S0, B)
    room.preparer.unsaved = {S0}
    aim = await room.aim()
    assert isinstance(aim, Aim)
    assert (aim.preparation, aim.slot) == (NEW, S1)
    assert room.client.prefilled == [(S1, 0)]


async def test_one_that_is_found_needs_not_be_kept_out() -> None:
    room = Room()
    room.house(S0, B)
    room.preparer.unsaved = {S0}
    room.preparer.stored = True
    assert await room.aim() == Aim(RESTORED, room.session, S1, room.table.view(S1).occupancy)
    assert room.client.prefilled == []


async def test_where_there_is_no_other_slot_somebody_who_could_not_be_saved_has_to_leave() -> None:
    room = Room()
    room.house(S0, B)
    room.house(S1, B)
    room.preparer.unsaved = {S0}
    lease = await room.desk.acquire(Want(Purpose.FLOATING, A))
    alone = lease.part(S0)
    aim = await room.steering.aim(alone, Owner(room.session, cast(Any, Calls(HELLO)), "model"))
    assert isinstance(aim, Aim)
    assert (aim.preparation, aim.slot, room.client.prefilled) == (NEW, None, [])


@pytest.mark.parametrize("is_erased", [True, False])
async def test_a_slot_of_which_nothing_may_be_used_is_emptied_before(is_erased: bool) -> None:
    """The server takes what it finds there."""
    room = Room()
    room.house(S1, A)
    room.preparer.starts_over = is_erased
    aim = await room.aim()
    assert room.preparer.started_over == [S1]
    if is_erased:
        assert isinstance(aim, Aim)
        assert (aim.preparation.outcome, aim.slot) == (Outcome.COLD, None)
    else:
        assert isinstance(aim, ReplyError)
        assert (aim.code, aim.status) == (ErrorCode.ERASE_FAILED, 503)


async def test_nothing_is_asked_of_a_life_that_has_passed_and_had_more_slots() -> None:
    room = Room()
    lease = await room.desk.acquire(Want(Purpose.FLOATING, A))
    room.table.begin_epoch(1)
    room.desk.epoch_began()
    room.table.seen([idle(0)])
    aim = await room.steering.aim(lease, Owner(room.session, cast(Any, Calls(HELLO)), "model"))
    assert aim == NOWHERE
    assert (room.preparer.asked, room.recogniser.at_home) == ([], 0)
