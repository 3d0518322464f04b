from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvproxy.errors import NotPinned, UpstreamError
from kvproxy.identifiers import SlotId
from kvproxy.slots.leases import Purpose, Want
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.telemetry.events import ServerReady, ServerUnavailable, VolatileSlotsSeen
from kvproxy.upstream.acquaintance import ANSWER_SECONDS, CANARY_SECONDS
from kvproxy.upstream.facts import (
    KEY_ADVICE,
    NO_SLOTS_ADVICE,
    SAVE_PATH_ADVICE,
    SERIAL_ADVICE,
    VOLATILE_ADVICE,
    PersistenceMode,
    ServerState,
    Standing,
    WindowFacts,
)
from kvproxy.upstream.replies import (
    ActionFailure,
    Completed,
    Erased,
    Fault,
    Obstacle,
    Props,
    SlotInfo,
    Unavailable,
)
from kvproxy.upstream.trial import Trial
from kvproxy.upstream.watch import ASKED_SECONDS, FRESH_SECONDS, Watch
from tests.support.fakes_core import (
    PROPS,
    UNREACHABLE,
    A,
    Late,
    World,
    idle,
    processing,
    settle,
    stay,
)
from tests.support.proxy import eventually

S0 = SlotId(0)
OTHER = replace(PROPS, marker="<__media_2__>")
ASLEEP = replace(PROPS, is_sleeping=True)
LOADING = Unavailable(Obstacle.LOADING, "Loading model")
WANTS_KEY = Unavailable(Obstacle.UNAUTHORIZED, "Invalid API Key")
HIDDEN = Unavailable(Obstacle.UNSUPPORTED, "This server does not support slots endpoint")


class Room(World):
    """A server nobody has asked yet, with the line to it standing."""

    def __init__(self, setting: MemoryKind | None = None) -> None:
        super().__init__()
        self.standing = Standing()
        self.desk.suspend()
        self.line = True
        self.looks = 0
        self.try_out(None)
        self.process_changes = 0
        self.watch = Watch(
            self.watch_parts(
                setting=setting,
                line_stands=lambda: self.line,
                look=self._look,
                process_changed=self._process_changed,
                try_out=lambda slots: self.verdict(slots),
            )
        )

    def _look(self) -> None:
        self.looks += 1

    def try_out(self, verdict: bool | None, shares: bool | None = None) -> list[bool]:
        """Let slots be tried out with this result; whether anything was granted each time it was."""
        seen: list[bool] = []

        async def clears(slots: Sequence[SlotInfo]) -> Trial:
            seen.append(self.grants)
            return Trial(verdict, shares)

        self.verdict = clears
        return seen

    def _process_changed(self) -> None:
        self.process_changes += 1

    async def ask(self, *answers: object) -> None:
        """One question; `answers` to `/props` in turn."""
        if answers:
            self.server.answer("props", *answers)
        await self.watch.refresh()

    @property
    def facts(self) -> Any:
        return self.standing.facts

    @property
    def epoch(self) -> int:
        return self.table.epoch

    @property
    def grants(self) -> bool:
        return not self.desk.is_suspended


async def met(**answers: object) -> Room:
    """A room whose server was asked once."""
    room = Room()
    for verb, answer in answers.items():
        room.server.answer(verb, answer)
    await room.ask()
    room.log.clear()
    return room


class TestFirstMeeting:
    async def test_a_server_that_answers_has_slots_that_are_granted(self) -> None:
        room = Room()
        before = room.epoch
        await room.ask()

        assert (room.facts.state, room.facts.reason, room.facts.props) == (ServerState.HEALTHY, "", PROPS)
        assert (room.facts.persistence.mode, room.facts.pins) == (PersistenceMode.PLAIN, True)
        assert (room.epoch, room.grants, room.process_changes) == (before + 1, True, 1)
        assert [view.state for view in room.table.views()] == ["idle", "idle"]
        asked = [
            "props",
            "settled",
            "supported?",
            "adapters",
            "slots",
            "canary 1",
            "erase 1",
            "props",
            "slots",
        ]
        asked += ["slots"]  # after the trials
        assert room.log == asked

    async def test_it_is_told_and_only_the_second_life_is_a_restart(self) -> None:
        room = await met()
        await room.ask(OTHER)

        assert [event.restarted for event in room.sink.of(ServerReady)] == [False, True]

    async def test_a_slot_that_runs_something_already_is_not_granted_and_looked_after(self) -> None:
        room = await met(slots=(processing(0), idle(1)))

        assert [view.state for view in room.table.views()] == ["unknown", "idle"]
        assert room.looks == 1

    async def test_a_server_without_a_save_path_serves_and_says_which_flag_is_missing(self) -> None:
        room = await met(supported=ActionFailure(Fault.UNSUPPORTED, "", 501))

        assert (room.facts.state, room.facts.reason) == (ServerState.DEGRADED, SAVE_PATH_ADVICE)
        assert (room.facts.pins, room.grants) == (True, True)

    async def test_the_servers_own_words_come_before_the_advice(self) -> None:
        room = await met(supported=ActionFailure(Fault.UNSUPPORTED, "not supported", 501))
        assert room.facts.reason == f"not supported: {SAVE_PATH_ADVICE}"

    async def test_a_server_that_wants_a_key_for_actions_says_so(self) -> None:
        room = await met(supported=ActionFailure(Fault.UNAUTHORIZED, "Invalid API Key", 401))
        assert room.facts.reason == KEY_ADVICE

    async def test_a_server_that_hides_its_slots_is_not_pinned_and_not_saved(self) -> None:
        room = await met(slots=HIDDEN)

        assert (room.facts.state, room.facts.reason) == (ServerState.DEGRADED, NO_SLOTS_ADVICE)
        assert (room.facts.pins, room.facts.persistence.is_on, room.grants) == (False, False, False)

    async def test_a_server_too_busy_to_show_its_slots_is_looked_at_until_it_does(self) -> None:
        # It answers `/slots` between two batches, and a long one takes longer than our patience.
        room = await met(slots=UNREACHABLE)

        assert (room.facts.state, room.facts.pins, room.facts.persistence.is_on) == (
            ServerState.HEALTHY,
            True,
            True,
        )
        assert (room.table.unsettled, room.looks, room.grants) == (2, 1, True)

    async def test_what_is_believed_to_the_end_of_a_life_is_asked_for_with_patience(self) -> None:
        room = await met()
        patience = dict.fromkeys(("props", "supported", "meta"), ANSWER_SECONDS)
        assert room.server.patience == patience | {"canary": CANARY_SECONDS}

    async def test_a_sleeping_server_is_met_without_waking_it(self) -> None:
        room = await met(props=ASLEEP)
        await room.ask()

        assert room.facts.state is ServerState.SLEEPING
        assert not {"slots", "supported?"} & set(room.log)
        assert [(view.state, view.is_blank) for view in room.table.views()] == [("idle", True)] * 2

    async def test_one_that_was_met_asleep_is_asked_what_it_allows_when_it_wakes(self) -> None:
        room = await met(props=ASLEEP)
        assert not room.facts.persistence.is_on

        await room.ask(PROPS)

        assert room.facts.persistence.is_on
        assert room.facts.state is ServerState.HEALTHY

    async def test_another_fingerprint_is_taken_of_another_model(self) -> None:
        room = await met()
        first = room.facts.fingerprint
        await room.ask(replace(OTHER, model_path="/models/two.gguf"))
        assert room.facts.fingerprint != first


class TestLeftovers:
    """A canary, or the erase after it, that did not end in time."""

    async def test_a_slot_with_a_dropped_canary_is_granted_once_it_was_quiet(self) -> None:
        room = await met(canary=UNREACHABLE)
        assert [view.state for view in room.table.views()] == ["idle", "cancelling"]
        assert (room.grants, room.looks > 0) == (True, True)

    async def test_one_whose_erase_is_late_is_granted_when_that_has_ended(self) -> None:
        late = Late()
        room = await met(erase=late)
        assert [view.state for view in room.table.views()] == ["idle", "quarantined"]

        late.end(Erased(1))
        await settle()

        assert [view.state for view in room.table.views()] == ["idle", "idle"]

    async def test_one_that_runs_something_by_then_is_left_to_be_seen_idle(self) -> None:
        room = Room()
        room.server.answer("canary", UNREACHABLE)
        room.server.answer("slots", (idle(0), idle(1)), (idle(0), processing(1)))
        await room.ask()
        assert [view.state for view in room.table.views()] == ["idle", "unknown"]


class TestRenewal:
    async def test_the_same_process_is_met_anew_once_it_may_compute_something_else(self) -> None:
        room = await met()
        room.house(0, stay(A))
        before = room.epoch

        room.watch.renew()
        assert not room.grants
        await room.ask()
        await room.ask()

        assert (room.epoch, room.occupant(0), room.grants) == (before + 1, None, True)


class TestSameLife:
    async def test_a_server_that_is_the_same_keeps_all_that_is_believed(self) -> None:
        room = await met()
        room.house(0, stay(A))
        before = room.epoch

        await room.ask()

        assert (room.epoch, room.occupant(0), room.log) == (before, "a" * 12, ["props"])

    async def test_a_suspicion_that_proves_wrong_costs_a_question_and_nothing_else(self) -> None:
        room = await met()
        room.house(0, stay(A))
        room.watch.suspect()
        assert not room.grants

        await room.ask()

        assert (room.grants, room.occupant(0)) == (True, "a" * 12)

    async def test_one_without_a_marker_is_another_one_once_it_is_suspected(self) -> None:
        plain = replace(PROPS, marker="")
        room = await met(props=plain)
        before = room.epoch
        await room.ask()
        assert room.epoch == before

        room.watch.suspect()
        await room.ask()

        assert room.epoch == before + 1

    async def test_one_that_fell_asleep_has_empty_slots_and_one_that_woke_is_the_same(self) -> None:
        room = await met()
        room.house(0, stay(A))
        before = room.epoch

        await room.ask(ASLEEP)
        assert (room.epoch, room.facts.state, room.occupant(0)) == (before + 1, ServerState.SLEEPING, None)
        assert room.facts.persistence.is_on, "what it allows does not change in its sleep"

        await room.ask(PROPS)
        assert (room.epoch, room.facts.state) == (before + 1, ServerState.HEALTHY)

    async def test_one_that_woke_and_fell_asleep_again_between_two_questions_has_empty_slots(self) -> None:
        room = await met()
        await room.ask(ASLEEP)
        before = room.epoch
        await room.ask(ASLEEP)
        assert room.epoch == before

        room.house(0, stay(A))
        await room.ask(ASLEEP)

        assert (room.epoch, room.occupant(0)) == (before + 1, None)

    async def test_one_that_is_just_being_woken_by_a_request_is_the_same(self) -> None:
        room = await met()
        await room.ask(ASLEEP)
        before = room.epoch
        lease = await room.desk.acquire(Want(Purpose.PINNED, A))
        room.table.serve(lease.slot, lease.epoch, stay(A))

        await room.ask(ASLEEP)

        assert room.epoch == before

    async def test_a_slow_answer_is_no_loss_as_long_as_the_line_stands(self) -> None:
        room = await met()
        await room.ask(UNREACHABLE)
        assert (room.facts.state, room.grants) == (ServerState.HEALTHY, True)


class TestAnotherLife:
    async def test_another_process_ends_everything_that_was_believed(self) -> None:
        room = await met()
        room.house(0, stay(A))
        lease = await room.desk.acquire(Want(Purpose.PINNED, A))

        await room.ask(OTHER)

        assert (lease.is_void, room.occupant(0), room.process_changes) == (True, None, 2)
        session = room.registry.find(A)
        assert session is not None
        assert session.lost_to_restart

    @pytest.mark.parametrize(
        "change",
        [
            {"build": "b2"},
            {"total_slots": 4},
            {"n_ctx": 1},
            {"model_path": "/m"},
            {"model_ftype": "Q8_0"},
            {"marker": "x"},
        ],
    )
    async def test_it_is_known_by_any_trait_that_differs(self, change: dict[str, Any]) -> None:
        room = await met()
        before = room.epoch
        await room.ask(replace(PROPS, **change))
        assert room.epoch == before + 1

    async def test_it_is_not_met_while_a_call_that_was_meant_for_the_one_before_may_reach_it(self) -> None:
        room = await met()
        ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        room.server.answer("settled", ended)

        asking = asyncio.ensure_future(room.ask(OTHER))
        await settle()
        assert (room.log, room.grants) == (["props", "settled"], False)

        ended.set_result(True)
        await asking
        assert room.grants

    async def test_what_is_still_under_way_after_the_trials_is_seen(self) -> None:
        room = Room()
        room.server.answer("slots", (idle(0), idle(1)), (idle(0), idle(1)), (idle(0), processing(1)))
        await room.ask()
        assert [view.state for view in room.table.views()] == ["idle", "unknown"]

    async def test_a_doubt_that_arises_while_it_is_being_met_asks_once_more(self) -> None:
        room = Room()
        doubts = iter([room.watch.suspect])

        def slots() -> Any:
            next(doubts, lambda: None)()
            return (idle(0), idle(1))

        room.server.answer("slots", slots)
        await room.ask(PROPS, OTHER)

        assert room.facts.props == OTHER
        assert room.log.count("supported?") == 2
        assert room.grants

    async def test_an_answer_from_before_a_doubt_is_not_believed(self) -> None:
        room = await met()
        room.house(0, stay(A))

        def answer() -> Props:
            room.server.answer("props", OTHER)
            room.watch.suspect()
            return PROPS

        await room.ask(answer)

        assert (room.facts.props, room.occupant(0), room.grants) == (OTHER, None, True)


class TestUnavailable:
    async def test_a_server_that_is_gone_grants_nothing_and_sends_the_line_away(self) -> None:
        room = await met()
        await room.desk.acquire(Want(Purpose.EXCLUSIVE))
        waiting = asyncio.ensure_future(room.desk.acquire(Want(Purpose.PINNED)))
        await settle()
        room.line = False

        await room.ask(UNREACHABLE)

        assert (room.facts.state, room.grants) == (ServerState.UNREACHABLE, False)
        with pytest.raises(UpstreamError) as caught:
            await waiting
        assert str(caught.value) == "llama-server at http://llama:8080 cannot be reached: connection refused"

    async def test_one_that_is_suspected_and_silent_is_gone_though_the_line_stands(self) -> None:
        room = await met()
        room.watch.suspect()
        await room.ask(UNREACHABLE)
        assert room.facts.state is ServerState.UNREACHABLE

    async def test_its_loss_is_told_once(self) -> None:
        room = await met()
        room.line = False
        await room.ask(UNREACHABLE)
        await room.ask(UNREACHABLE)
        assert [event.state for event in room.sink.of(ServerUnavailable)] == ["unreachable"]

    async def test_one_that_is_not_there_at_the_start_is_told_at_the_first_look_and_only_then(self) -> None:
        room = Room()
        room.line = False
        for _ in range(3):
            await room.ask(UNREACHABLE)
        (told,) = room.sink.of(ServerUnavailable)
        sentence = "llama-server at http://llama:8080 cannot be reached: connection refused"
        assert told.reason == f"{sentence}; start it there, or set upstreams[].url"

    async def test_what_was_believed_stands_if_it_comes_back_the_same(self) -> None:
        room = await met()
        room.house(0, stay(A))
        room.line = False
        await room.ask(UNREACHABLE)

        await room.ask(PROPS)

        assert (room.facts.state, room.grants, room.occupant(0)) == (ServerState.HEALTHY, True, "a" * 12)

    async def test_whoever_waits_for_a_server_that_loads_goes_on_waiting(self) -> None:
        room = await met()
        room.watch.suspect()
        waiting = asyncio.ensure_future(room.desk.acquire(Want(Purpose.PINNED)))
        await room.ask(LOADING)
        await settle()
        assert (room.facts.state, waiting.done()) == (ServerState.LOADING, False)

        await room.ask(OTHER)

        assert (await waiting).epoch == room.epoch

    async def test_a_server_that_wants_a_key_to_tell_who_it_is_is_not_pinned(self) -> None:
        room = Room()
        await room.ask(WANTS_KEY)
        assert (room.facts.state, room.facts.reason, room.facts.pins) == (
            ServerState.DEGRADED,
            KEY_ADVICE,
            False,
        )

        await room.ask(PROPS)
        assert (room.facts.state, room.facts.pins, room.grants) == (ServerState.HEALTHY, True, True)


class TestVolatile:
    async def test_where_answers_can_be_saved_a_server_that_clears_idle_slots_is_pinned_still(self) -> None:
        room = await met()

        room.watch.findings.found_volatile()

        assert (room.facts.state, room.facts.reason) == (ServerState.DEGRADED, SERIAL_ADVICE)
        assert (room.facts.pins, room.facts.persistence.is_on, room.facts.is_volatile) == (True, True, True)
        assert (room.table.is_volatile, room.grants) == (True, True)

    async def test_where_nothing_can_be_saved_it_is_not_pinned_any_more(self) -> None:
        room = await met(supported=ActionFailure(Fault.UNSUPPORTED, "", 501))
        await room.desk.acquire(Want(Purpose.EXCLUSIVE))
        waiting = asyncio.ensure_future(room.desk.acquire(Want(Purpose.PINNED)))
        await settle()

        room.watch.findings.found_volatile()

        assert (room.facts.state, room.facts.reason) == (ServerState.DEGRADED, VOLATILE_ADVICE)
        assert (room.facts.pins, room.facts.persistence.is_on, room.facts.is_volatile) == (False, False, True)
        assert not room.table.is_volatile
        with pytest.raises(NotPinned):
            await waiting

    async def test_it_is_told_once(self) -> None:
        room = await met()
        room.watch.findings.found_volatile()
        room.watch.findings.found_volatile()
        (told,) = room.sink.of(VolatileSlotsSeen)
        assert told.advice == SERIAL_ADVICE

    async def test_it_stays_unpinned_after_a_while_without_a_line(self) -> None:
        room = await met(supported=ActionFailure(Fault.UNSUPPORTED, "", 501))
        room.watch.findings.found_volatile()
        room.line = False
        await room.ask(UNREACHABLE)
        room.line = True

        await room.ask(PROPS)

        assert (room.facts.is_volatile, room.facts.pins, room.grants) == (True, False, False)

    async def test_it_says_so_still_after_a_while_without_a_line(self) -> None:
        room = await met()
        room.watch.findings.found_volatile()
        room.line = False
        await room.ask(UNREACHABLE)
        room.line = True

        await room.ask(PROPS)

        assert (room.facts.state, room.facts.reason) == (ServerState.DEGRADED, SERIAL_ADVICE)

    async def test_its_next_life_is_not_known_to_be_until_the_proof_is_there_again(self) -> None:
        room = await met()
        room.watch.findings.found_volatile()
        await room.ask(OTHER)
        assert (room.facts.is_volatile, room.facts.pins, room.grants) == (False, True, True)

    async def test_one_that_only_slept_is_still_known_to_be(self) -> None:
        room = await met()
        room.watch.findings.found_volatile()
        await room.ask(ASLEEP)
        assert (room.facts.is_volatile, room.table.is_volatile, room.grants) == (True, True, True)
        assert room.facts.state is ServerState.SLEEPING
        assert len(room.sink.of(VolatileSlotsSeen)) == 2

    async def test_the_same_life_is_known_to_be_without_another_trial(self) -> None:
        room = await met()
        room.watch.findings.found_volatile()
        await settle()
        seen = room.try_out(None)
        room.watch.renew()
        await room.ask(PROPS)
        assert (room.facts.is_volatile, seen) == (True, [])

    async def test_it_is_tried_out_before_anything_is_granted(self) -> None:
        room = Room()
        seen = room.try_out(True)
        await room.ask()
        assert seen == [False]
        assert (room.facts.is_volatile, room.grants) == (True, True)

    @pytest.mark.parametrize("verdict", [False, None])
    async def test_one_that_keeps_its_slots_or_does_not_tell_is_believed(self, verdict: bool | None) -> None:
        room = Room()
        room.try_out(verdict)
        await room.ask()
        assert (room.facts.is_volatile, room.sink.of(VolatileSlotsSeen)) == (False, [])

    async def test_it_is_not_tried_out_while_strangers_requests_are_on_their_way(self) -> None:
        room = Room()
        seen = room.try_out(True)
        room.desk.stray_began()
        await room.ask()
        assert seen == []

    @pytest.mark.parametrize(
        "answers", [{"supported": ActionFailure(Fault.UNSUPPORTED, "", 501)}, {"slots": UNREACHABLE}]
    )
    async def test_it_is_not_tried_out_where_slots_are_not_seen_or_cannot_be_emptied(
        self, answers: dict[str, object]
    ) -> None:
        room = Room()
        seen = room.try_out(True)
        for verb, answer in answers.items():
            room.server.answer(verb, answer)
        await room.ask()
        assert seen == []

    async def finds_empty(self, room: Room) -> None:
        """It is found out why; until then nothing is granted."""
        room.watch.emptied(S0)
        assert not room.grants
        await room.watch.refresh()

    async def test_an_empty_slot_of_the_same_life_is_the_proof(self) -> None:
        room = await met()
        room.server.answer("slots", (idle(0, tokens=0, task=3), idle(1)))
        await self.finds_empty(room)
        assert (room.facts.is_volatile, room.grants) == (True, True)

    async def test_an_empty_slot_that_has_run_nothing_was_slept_away(self) -> None:
        room = await met()
        before = room.epoch
        room.server.answer("slots", (idle(0), idle(1)))
        await self.finds_empty(room)
        assert (room.epoch, room.facts.is_volatile, room.grants) == (before + 1, False, True)
        await room.watch.refresh()
        assert room.epoch == before + 1

    async def test_an_empty_slot_of_another_life_is_none(self) -> None:
        room = await met()
        room.server.answer("props", OTHER)
        await self.finds_empty(room)
        assert not room.facts.is_volatile

    async def test_why_a_slot_is_empty_is_found_out_when_the_server_answers(self) -> None:
        room = await met()
        room.server.answer("slots", (idle(0, tokens=0, task=3), idle(1)))
        room.server.answer("props", UNREACHABLE, PROPS)
        await self.finds_empty(room)
        assert (room.facts.is_volatile, room.grants) == (False, False)
        await room.watch.refresh()
        assert (room.facts.is_volatile, room.grants) == (True, True)

    async def test_a_doubt_that_comes_while_it_is_found_out_wants_another_answer(self) -> None:
        room = await met()
        looked: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        room.server.answer("slots", looked)
        room.server.answer("props", PROPS, OTHER)
        room.watch.emptied(S0)
        finding = asyncio.ensure_future(room.watch.refresh())
        await settle()
        room.watch.suspect()
        room.server.answer("slots", (idle(0), idle(1)))
        looked.set_result((idle(0, tokens=0, task=3), idle(1)))
        await finding
        assert room.facts.props == OTHER


class TestConfirming:
    async def confirms(self, room: Room) -> int:
        """How many questions a request's confirmation costs."""
        room.log.clear()
        await room.watch.confirm()
        return room.log.count("props")

    async def test_what_a_request_has_asked_a_moment_ago_it_does_not_ask_again(self) -> None:
        room = await met()
        assert await self.confirms(room) == 1
        room.clock.advance(ASKED_SECONDS)
        assert await self.confirms(room) == 0
        room.clock.advance(0.001)
        assert await self.confirms(room) == 1

    async def test_what_was_asked_for_nobody_spares_no_request_a_question(self) -> None:
        """The server may have fallen asleep since: the question did not keep it awake."""
        room = await met()
        await room.ask(PROPS)
        assert await self.confirms(room) == 1

    async def test_an_answer_that_went_by_spares_the_next_request_a_question(self) -> None:
        room = await met()
        room.clock.advance(5)
        room.watch.confirmed()
        room.clock.advance(FRESH_SECONDS)
        assert await self.confirms(room) == 0
        room.clock.advance(0.001)
        assert await self.confirms(room) == 1

    async def test_a_server_that_runs_something_for_us_is_awake(self) -> None:
        room = await met()
        room.clock.advance(5)
        lease = await room.desk.acquire(Want(Purpose.PINNED, A))
        room.table.serve(lease.slot, lease.epoch, stay(A))
        assert await self.confirms(room) == 1
        room.clock.advance(5)
        room.table.launched(lease.slot, lease.epoch)
        assert await self.confirms(room) == 0

    @pytest.mark.parametrize(
        "cast_doubt",
        [
            lambda room: room.watch.suspect(),
            lambda room: room.watch.nudge(),
            lambda room: setattr(room, "line", False),
        ],
    )
    async def test_what_is_in_doubt_is_asked_however_fresh(self, cast_doubt: Callable[[Room], None]) -> None:
        room = await met()
        cast_doubt(room)
        room.watch.confirmed()
        assert await self.confirms(room) == 1

    async def test_a_new_line_is_in_doubt_until_the_answer_is_there(self) -> None:
        room = await met()
        gate: asyncio.Future[Props] = asyncio.get_running_loop().create_future()
        room.server.answer("props", gate)
        room.watch.nudge()
        asking = asyncio.ensure_future(room.watch.refresh())
        await settle()

        confirming = asyncio.ensure_future(room.watch.confirm())
        await settle()
        assert not confirming.done()
        gate.set_result(OTHER)

        assert (await confirming).props == OTHER
        await asking

    async def test_an_answer_to_a_question_from_before_the_line_does_not_tell_of_it(self) -> None:
        room = await met()
        gate: asyncio.Future[Props] = asyncio.get_running_loop().create_future()
        room.server.answer("props", gate, OTHER)
        room.clock.advance(5)
        asking = asyncio.ensure_future(room.watch.refresh())
        await settle()
        room.watch.nudge()

        confirming = asyncio.ensure_future(room.watch.confirm())
        await settle()
        gate.set_result(PROPS)

        assert (await confirming).props == OTHER
        await asking

    async def test_a_new_line_without_an_answer_stays_in_doubt(self) -> None:
        room = await met()
        room.watch.nudge()
        await room.ask(UNREACHABLE)
        assert await self.confirms(room) == 1

    async def test_a_server_that_was_not_there_is_asked_for_each_request(self) -> None:
        room = await met()
        room.line = False
        await room.ask(LOADING)
        room.line = True
        assert await self.confirms(room) == 1

    async def test_questions_at_the_same_time_are_one(self) -> None:
        room = await met()
        room.clock.advance(5)
        await asyncio.gather(*(room.watch.confirm() for _ in range(5)))
        assert room.log == ["props"]

    async def test_one_who_asked_and_left_does_not_take_the_answer_from_the_others(self) -> None:
        room = await met()
        gate: asyncio.Future[Props] = asyncio.get_running_loop().create_future()
        room.server.answer("props", gate)
        left, stays = asyncio.ensure_future(room.watch.refresh()), asyncio.ensure_future(room.watch.refresh())
        await settle()

        left.cancel()
        gate.set_result(OTHER)
        await stays

        assert room.facts.props == OTHER


class TestRunning:
    async def test_a_suspicion_wakes_it_at_once(self) -> None:
        room = Room()
        running = asyncio.get_running_loop().create_task(room.watch.run())
        await settle()
        room.server.answer("props", OTHER)

        room.watch.suspect()
        await eventually(lambda: room.facts.props == OTHER)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        assert room.facts.props == OTHER

    async def test_a_suspicion_that_comes_with_the_answer_is_not_forgotten(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        room = Room()
        ask, doubts = room.watch.refresh, iter([room.watch.suspect])

        async def refresh() -> None:
            await ask()
            next(doubts, lambda: None)()

        monkeypatch.setattr(room.watch, "refresh", refresh)
        running = asyncio.get_running_loop().create_task(room.watch.run())
        await eventually(lambda: room.log.count("props") == 3)
        await settle()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        assert (room.log.count("supported?"), room.grants) == (1, True)


async def test_what_was_seen_of_the_window_is_among_the_facts() -> None:
    room = Room(MemoryKind.SLIDING_WINDOW)
    room.server.answer("complete", Completed(10, 0), Completed(1, 79))
    await room.ask()
    assert room.facts.window == WindowFacts(is_whole=True)
