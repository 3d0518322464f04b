from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvproxy.identifiers import Epoch, SlotId
from kvproxy.slots.leases import Purpose, Want
from kvproxy.snapshots.canaries import LIFE, stand_in
from kvproxy.snapshots.fingerprint import CANARY_FIELD, Fingerprint
from kvproxy.upstream import late_canary
from kvproxy.upstream.facts import Persistence, PersistenceMode, ServerState
from kvproxy.upstream.late_canary import FIRST_PAUSE_SECONDS, MOST_ATTEMPTS, LateCanary
from kvproxy.upstream.replies import Obstacle, Unavailable
from tests.support.fakes_core import (
    FINGERPRINT,
    UNREACHABLE,
    A,
    B,
    Late,
    World,
    idle,
    settle,
    stay,
)

S0, S1 = SlotId(0), SlotId(1)
ODD = Unavailable(Obstacle.NOT_LLAMA_SERVER, "no probabilities")
NOBODY = Want(Purpose.PINNED)


class FakeWatch:
    def __init__(self, room: Room) -> None:
        self.room = room
        self.asked = 0
        self.findings = self

    async def confirm(self) -> Any:
        self.asked += 1
        return self.room.standing.facts

    async def refresh(self) -> None:
        self.asked += 1

    def found_canary(self, epoch: Epoch, fingerprint: Fingerprint) -> None:
        self.room.standing.set(fingerprint=fingerprint, canary=fingerprint.get(CANARY_FIELD))


class Room(World):
    """Two slots seen idle and blank, at a server whose canary is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.watch = FakeWatch(self)
        parts = self.watch_parts(look=self._look)
        self.late = LateCanary(parts, cast(Any, self.watch), erase=self.preparer.erase)
        self.unknown()

    def unknown(self) -> None:
        name = stand_in("one-life")
        fingerprint = Fingerprint.from_dict(FINGERPRINT.as_dict() | {CANARY_FIELD: name})
        self.standing.set(canary=name, fingerprint=fingerprint)

    def _look(self) -> None:
        self.looks += 1

    async def passes(self, seconds: float = FIRST_PAUSE_SECONDS) -> list[str]:
        """What the server was asked, now and after so much time."""
        self.log.clear()
        await self.late.run_once()
        self.clock.advance(seconds)
        await self.late.run_once()
        await settle()
        return [entry for entry in self.log if entry.split()[0] in ("canary", "erase")]

    @property
    def is_known(self) -> bool:
        return not self.standing.facts.canary.startswith(LIFE)


async def test_after_a_pause_it_is_asked_for_in_a_blank_slot_which_is_erased_again() -> None:
    room = Room()
    assert await room.passes(0) == []
    assert await room.passes() == ["canary 1", "erase 1"]
    assert room.is_known
    assert (room.state(1), room.table.view(S1).is_blank, room.desk.out) == ("idle", True, 0)


async def test_nothing_but_the_canary_changes_in_the_identity() -> None:
    room = Room()
    before = room.standing.facts.fingerprint
    await room.passes()
    after = room.standing.facts.fingerprint
    assert before is not None
    assert after is not None
    assert after.diff(before) == (CANARY_FIELD,)
    assert room.canaries.canary(after.get(CANARY_FIELD)) is not None


async def test_a_known_one_is_never_asked_for_again() -> None:
    room = Room()
    await room.passes()
    assert await room.passes(1e6) == []


@pytest.mark.parametrize("answer", [UNREACHABLE, ODD], ids=["too late", "odd"])
async def test_an_attempt_in_vain_is_made_again_after_longer_and_longer_and_not_for_ever(
    answer: Unavailable,
) -> None:
    room = Room()
    room.server.answer("canary", answer)
    pause, passed = FIRST_PAUSE_SECONDS, 0.0
    for _ in range(MOST_ATTEMPTS):
        assert await room.passes(pause - passed - 1) == []
        assert len(await room.passes(1)) == 1
        for passed in (0.0, 2.5):
            room.clock.advance(passed)
            room.table.seen([idle(0), idle(1)])  # the dropped one is over
        pause *= 2
    assert await room.passes(1e6) == []
    assert not room.is_known


async def test_a_slot_whose_canary_did_not_come_is_not_used_until_it_is_quiet() -> None:
    room = Room()
    room.server.answer("canary", UNREACHABLE)
    await room.passes()
    assert (room.state(1), room.looks, room.desk.out) == ("cancelling", 1, 0)


async def test_another_life_has_its_attempts_anew() -> None:
    room = Room()
    room.server.answer("canary", ODD)
    await room.passes()
    room.live()
    room.unknown()
    room.server.answer("canary", ((1, -0.5), (2, -1.5)))
    assert await room.passes(0) == []
    assert await room.passes() == ["canary 1", "erase 1"]


async def test_nobodys_leftovers_may_be_overwritten_but_no_conversation() -> None:
    room = Room()
    room.house(1, stay(B))
    room.table.serve(S0, room.table.epoch, None)
    room.table.served(S0, room.table.epoch, None, tokens=50)
    assert await room.passes() == ["canary 0", "erase 0"]
    full = Room()
    full.house(0, stay(A))
    full.house(1, stay(B))
    assert await full.passes() == []


async def test_it_waits_while_anything_is_under_way() -> None:
    room = Room()
    lease = await room.desk.acquire(NOBODY)
    assert await room.passes() == []
    lease.release()
    assert await room.passes(0) == ["canary 1", "erase 1"]


async def test_what_was_computed_beside_another_request_counts_for_nothing() -> None:
    room = Room()

    async def meanwhile() -> object:
        lease = await room.desk.acquire(NOBODY)
        room.table.serve(lease.slot, lease.epoch, None)
        room.clock.advance(0.1)
        room.table.served(lease.slot, lease.epoch, None)
        lease.release()
        return ((1, -0.5), (2, -1.5))

    room.server.answer("canary", meanwhile)
    assert await room.passes() == ["canary 1", "erase 1"]
    assert not room.is_known


async def test_the_answer_of_a_server_that_became_another_is_not_believed() -> None:
    room = Room()

    def restart() -> object:
        room.live()
        room.unknown()
        return ((1, -0.5), (2, -1.5))

    room.server.answer("canary", restart)
    await room.passes()
    assert not room.is_known
    assert room.desk.out == 0


@pytest.mark.parametrize(
    "facts",
    [
        {"state": ServerState.SLEEPING},
        {"state": ServerState.UNREACHABLE},
        {"persistence": Persistence(PersistenceMode.OFF, "no save path")},
        {"pins": False},
    ],
    ids=["asleep", "gone", "saves nothing", "not pinned"],
)
async def test_a_server_for_which_it_is_of_no_use_is_not_asked(facts: dict[str, Any]) -> None:
    room = Room()
    room.standing.set(**facts)
    assert await room.passes() == []


async def test_where_its_launch_would_clear_what_is_not_saved_it_waits() -> None:
    room = Room()
    room.house(0, stay(A))
    room.table.is_volatile = True
    assert await room.passes() == []
    room.table.checkpointed(S0, room.table.epoch, A, stay(A).revision)
    assert await room.passes(0) == ["canary 1", "erase 1"]


async def test_where_it_has_no_room_it_waits() -> None:
    room = Room()
    room.house(0, stay(A, tokens=1000))
    room.table.pool = 1050
    assert await room.passes() == []
    room.table.pool = 1064
    assert await room.passes(0) == ["canary 1", "erase 1"]


async def test_a_task_that_ends_while_it_asks_leaves_the_slot_to_be_seen_idle() -> None:
    room = Room()
    late = Late()
    room.server.answer("canary", late.fate)
    await room.late.run_once()
    room.clock.advance(FIRST_PAUSE_SECONDS)
    asking = asyncio.ensure_future(room.late.run_once())
    await settle()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (room.state(1), room.desk.out) == ("cancelling", 0)


async def test_it_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_canary, "LOOK_SECONDS", 0.0)
    room = Room()
    running = asyncio.ensure_future(room.late.run())
    await settle(50)
    room.clock.advance(FIRST_PAUSE_SECONDS)
    await settle(200)
    running.cancel()
    assert room.is_known
