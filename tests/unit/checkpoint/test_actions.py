from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvproxy.checkpoint.actions import (
    BATCH_ALLOWANCE_SECONDS,
    START_BYTES_PER_TOKEN,
    Attempt,
    NotStarted,
    SlotActions,
)
from kvproxy.identifiers import Epoch
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import PersistenceRecovered, PersistenceTripped, TaskDied
from kvproxy.upstream.breaker import Breaker, BreakerState
from kvproxy.upstream.replies import ActionFailure, Fault, Saved
from tests.support.clock import FakeClock
from tests.support.fakes_core import MAIN, FakeAction, Late, Sink, settle

SAVED = Saved(1000, 5000)
REFUSED = ActionFailure(Fault.REFUSED, "no")


class Room:
    def __init__(self, *, max_failures: int = 2, cooldown: float = 60.0) -> None:
        self.clock = FakeClock()
        self.sink = Sink()
        self.tasks = TaskSet(lambda name, error: self.sink(TaskDied(name, error)))
        self.actions = SlotActions(
            MAIN,
            Breaker(max_failures, cooldown),
            epoch=lambda: self.epoch,
            clock=self.clock,
            emit=self.sink,
            tasks=self.tasks,
        )
        self.epoch = Epoch(1)
        self.late: list[object] = []
        self.started = 0

    async def run(self, answer: object = SAVED, *, deadline: float = 30.0) -> Attempt[Any]:
        return await self.actions.run(self.start(answer), Epoch(1), deadline, self.late.append)

    def start(self, answer: object) -> Callable[[], Any]:
        def start() -> Any:
            self.started += 1
            return FakeAction(answer)

        return start

    async def fail(self) -> None:
        self.actions.judge(await self.run(REFUSED), well=False, reason="disk full")


async def test_an_action_is_made_and_its_answer_given() -> None:
    attempt = await Room().run()

    assert (attempt.result, attempt.succeeded, attempt.timed_out) == (SAVED, True, False)


async def test_a_refusal_is_an_answer_and_no_success() -> None:
    attempt = await Room().run(REFUSED)

    assert (attempt.result, attempt.succeeded, attempt.timed_out) == (REFUSED, False, False)


async def test_actions_are_made_one_after_the_other() -> None:
    room = Room()
    gate: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
    first = asyncio.ensure_future(room.run(gate))
    second = asyncio.ensure_future(room.run())
    await settle()
    assert room.started == 1

    gate.set_result(SAVED)
    await asyncio.gather(first, second)
    assert room.started == 2


async def test_a_late_action_keeps_its_turn_until_its_fate_is_known() -> None:
    room = Room()
    late = Late()

    attempt = await room.run(late)
    assert attempt.timed_out
    assert (await room.run(deadline=0.0)).result is NotStarted.BUSY
    assert room.started == 1

    late.end(REFUSED)
    await settle()
    assert room.late == [REFUSED]
    assert (await room.run()).succeeded


async def test_an_action_that_waited_while_the_server_became_another_is_not_made() -> None:
    room = Room(max_failures=1)
    gate: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
    first = asyncio.ensure_future(room.run(gate))
    second = asyncio.ensure_future(room.run())
    await settle()

    room.epoch = Epoch(2)
    gate.set_result(SAVED)
    await first
    waited = await second
    room.actions.judge(waited, well=False, reason="another server")

    assert (waited.result, room.started) == (NotStarted.SUPERSEDED, 1)
    assert room.actions.breaker_state is BreakerState.CLOSED
    assert (await room.actions.run(room.start(SAVED), Epoch(2), 30.0, room.late.append)).succeeded


async def test_an_action_whose_asker_was_cancelled_goes_on_and_keeps_its_turn() -> None:
    room = Room()
    gate: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(room.run(gate))
    await settle()

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    assert (await room.run(deadline=0.0)).result is NotStarted.BUSY


async def test_one_whose_turn_comes_late_still_gets_the_time_that_it_takes() -> None:
    """With next to none it would time out, leave a slot in doubt, and count against persistence."""
    room = Room()
    gate: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
    first = asyncio.ensure_future(room.run(gate))
    second = asyncio.ensure_future(room.run(Late(), deadline=30.0))
    await settle()
    room.clock.advance(29.9)
    gate.set_result(SAVED)
    await first

    timed_out = (await second).result

    assert isinstance(timed_out, ActionFailure)
    assert timed_out.message == "no answer within 10 s"


async def test_an_action_that_dies_of_a_bug_does_not_keep_its_turn() -> None:
    def bug() -> object:
        raise ValueError("a bug")

    room = Room()
    with pytest.raises(ValueError, match="a bug"):
        await room.run(bug)

    assert (await room.run(deadline=0.0)).succeeded


async def test_an_action_that_waited_for_its_turn_in_vain_says_nothing_about_persistence() -> None:
    room = Room(max_failures=1)
    late = Late()
    await room.run(late)

    busy = await room.run(deadline=0.0)
    room.actions.judge(busy, well=False, reason="busy")

    assert (busy.era, room.actions.breaker_state) == (None, BreakerState.CLOSED)
    late.end(SAVED)


async def test_failures_in_a_row_open_the_breaker_once_and_no_call_is_made() -> None:
    room = Room(max_failures=2)
    await room.fail()
    assert room.actions.are_allowed
    await room.fail()

    assert (await room.run()).result is NotStarted.BREAKER_OPEN
    assert (room.started, room.actions.are_allowed) == (2, False)
    (tripped,) = room.sink.of(PersistenceTripped)
    assert (tripped.failures, tripped.cooldown_seconds, tripped.reason) == (2, 60.0, "disk full")


async def test_a_refused_turn_does_not_stay_taken() -> None:
    room = Room(max_failures=1)
    await room.fail()
    await room.run()
    room.clock.advance(60)

    assert (await room.run(deadline=0.0)).succeeded


async def test_a_success_between_failures_begins_the_count_anew() -> None:
    room = Room(max_failures=2)
    await room.fail()
    room.actions.judge(await room.run(), well=True)
    await room.fail()

    assert room.actions.breaker_state is BreakerState.CLOSED


async def test_after_the_cooldown_one_probe_that_goes_well_closes_the_breaker() -> None:
    room = Room(max_failures=1)
    await room.fail()
    room.clock.advance(60)
    assert room.actions.breaker_state is BreakerState.HALF_OPEN

    room.actions.judge(await room.run(), well=True)

    assert room.sink.of(PersistenceRecovered) == [PersistenceRecovered(MAIN)]
    assert room.actions.breaker_state is BreakerState.CLOSED


async def test_a_probe_without_a_verdict_leaves_its_place_to_the_next() -> None:
    room = Room(max_failures=1)
    await room.fail()
    room.clock.advance(60)
    probe = await room.run()
    assert not room.actions.are_allowed

    room.actions.judge(probe, well=None)

    assert room.actions.are_allowed


async def test_what_a_token_weighs_is_learned() -> None:
    room = Room()
    assert room.actions.bytes_per_token == START_BYTES_PER_TOKEN

    room.actions.learn(0, 100)
    assert room.actions.bytes_per_token == START_BYTES_PER_TOKEN
    room.actions.learn(100, 5000)

    assert room.actions.bytes_per_token == 50
    assert room.actions.save_seconds(1000) == 50_000 / room.actions.save_rate.bytes_per_second
    assert room.actions.save_seconds(None) == 0


async def test_a_deadline_grants_the_move_and_the_wait_for_a_running_batch() -> None:
    actions = Room().actions
    actions.learn(1, 1_000_000)
    rate = actions.save_rate

    alone = actions.deadline(rate, 1.0, tokens=600, others_run=False)
    assert alone == pytest.approx(3 * 600e6 / rate.bytes_per_second)
    beside = actions.deadline(rate, 1.0, tokens=600, others_run=True)
    assert beside == pytest.approx(alone + BATCH_ALLOWANCE_SECONDS)
    assert actions.deadline(rate, 1.0, tokens=600, size_bytes=60, others_run=False) == 1.0
    assert actions.deadline(rate, 7.0, tokens=None, others_run=False) == 7.0
