from __future__ import annotations

import pytest

from kvproxy.checkpoint.outcome import Trigger
from kvproxy.checkpoint.policy import (
    CHEAP_SECONDS,
    PRESSURE_SECONDS,
    CheckpointPolicy,
    Due,
    Pressure,
    after_request,
    is_worth_saving,
    next_due,
    save_ahead,
)
from kvproxy.identifiers import Revision, SlotId
from kvproxy.slots.slot import Occupancy, SlotView
from kvproxy.slots.state import SlotState
from tests.support.fakes_core import A, B, C

NOW = 10_000.0
S = SlotState
POLICY = CheckpointPolicy(on_idle_seconds=30, max_dirty_seconds=300, max_unsaved_tokens=1000, min_tokens=256)


def view(
    slot: int = 0,
    *,
    state: SlotState = S.RESIDENT,
    idle: float = 0.0,
    dirty_for: float | None = 0.0,
    tokens: int | None = 500,
    unsaved: int = 10,
    is_leased: bool = False,
) -> SlotView:
    """A slot used `idle` seconds ago, with work that is `dirty_for` seconds old (None: clean)."""
    is_dirty = dirty_for is not None
    since = NOW - dirty_for if dirty_for is not None else None
    key = (A, B, C)[slot]
    stay = Occupancy(key, Revision(1), Revision(0 if is_dirty else 1), tokens, unsaved, since)
    return SlotView(SlotId(slot), state, stay, is_leased, NOW - idle, False)


def empty(slot: int, *, state: SlotState = S.IDLE) -> SlotView:
    return SlotView(SlotId(slot), state, None, False, 0.0, True)


def due(*views: SlotView, policy: CheckpointPolicy = POLICY) -> tuple[Due, ...]:
    return next_due(views, policy, NOW)


def at(slot: int, trigger: Trigger) -> Due:
    return Due(SlotId(slot), trigger)


class TestNextDue:
    def test_a_slot_is_due_after_the_idle_time(self) -> None:
        assert due(view(idle=29.9)) == ()
        assert due(view(idle=30.0)) == (at(0, Trigger.IDLE),)

    @pytest.mark.parametrize("state", [S.SERVING, S.CANCELLING])
    def test_the_idle_checkpoint_waits_for_a_server_in_which_nothing_runs(self, state: SlotState) -> None:
        assert due(view(idle=60), view(1, state=state)) == ()

    def test_past_the_maximum_age_a_slot_is_due_however_busy_the_server_is(self) -> None:
        serving = view(1, state=S.SERVING)
        assert due(view(dirty_for=299), serving) == ()
        assert due(view(dirty_for=300), serving) == (at(0, Trigger.AGE),)

    def test_past_the_maximum_of_unsaved_tokens_a_slot_is_due(self) -> None:
        assert due(view(unsaved=999)) == ()
        assert due(view(unsaved=1000)) == (at(0, Trigger.AGE),)

    def test_the_age_of_work_without_a_date_counts_from_the_last_use(self) -> None:
        stay = Occupancy(A, Revision(1), Revision(0), 500, 1, None)
        old = SlotView(SlotId(0), S.RESIDENT, stay, False, NOW - 300, False)
        assert due(old, view(1, state=S.SERVING)) == (at(0, Trigger.AGE),)

    def test_the_longest_dirty_comes_first(self) -> None:
        views = [view(0, dirty_for=400), view(1, dirty_for=500), view(2, dirty_for=450)]
        assert [one.slot for one in due(*views)] == [1, 2, 0]

    @pytest.mark.parametrize(
        "unfit",
        [
            view(idle=60, dirty_for=None),
            view(idle=60, tokens=255),
            view(idle=60, is_leased=True),
            view(idle=60, state=S.SAVING),
            empty(0),
        ],
    )
    def test_what_is_clean_small_held_or_nobodys_is_never_due(self, unfit: SlotView) -> None:
        assert due(unfit) == ()

    def test_what_a_dropped_request_left_is_due_though_its_size_is_not_known(self) -> None:
        assert due(view(idle=60, tokens=None)) == (at(0, Trigger.IDLE),)

    def test_a_zero_switches_its_rule_off(self) -> None:
        off = CheckpointPolicy(on_idle_seconds=0, max_dirty_seconds=0, max_unsaved_tokens=0)
        assert due(view(idle=1e6, dirty_for=1e6, unsaved=10**9), policy=off) == ()


class TestSaveAhead:
    @staticmethod
    def ahead(
        *views: SlotView,
        cost: float = CHEAP_SECONDS,
        since_switch: float | None = 1.0,
        policy: object = POLICY,
    ) -> Due | None:
        last = None if since_switch is None else NOW - since_switch
        assert isinstance(policy, CheckpointPolicy)
        return save_ahead(views, policy, Pressure(last, lambda tokens: cost), NOW)

    def test_under_pressure_the_next_victim_is_saved_before_it_must_leave(self) -> None:
        assert self.ahead(view(0, idle=9), view(1, idle=1)) == at(0, Trigger.SWITCH)

    def test_without_a_recent_switch_nothing_is_saved_ahead(self) -> None:
        views = view(0, idle=9), view(1, idle=1)
        assert self.ahead(*views, since_switch=None) is None
        assert self.ahead(*views, since_switch=PRESSURE_SECONDS + 1) is None

    def test_as_long_as_a_slot_is_nobodys_there_is_no_victim(self) -> None:
        assert self.ahead(view(0, idle=9), empty(1)) is None

    def test_the_slot_in_use_now_or_last_is_never_saved_ahead(self) -> None:
        assert self.ahead(view(0, idle=1)) is None
        # The one that serves counts as used last, however long ago its last answer ended.
        assert self.ahead(view(0, idle=9), view(1, state=S.SERVING, idle=99)) == at(0, Trigger.SWITCH)

    def test_once_the_next_victim_is_saved_the_one_after_it_is(self) -> None:
        views = [view(0, idle=9, dirty_for=None), view(1, idle=5), view(2, idle=1)]
        assert self.ahead(*views) == at(1, Trigger.SWITCH)

    def test_a_clean_victim_needs_no_save(self) -> None:
        assert self.ahead(view(0, idle=9, dirty_for=None), view(1, idle=1)) is None

    def test_a_dear_save_waits_until_the_victim_was_idle_for_as_long_and_nothing_runs(self) -> None:
        other = view(1, idle=0)
        assert self.ahead(view(0, idle=1.9), other, cost=2.0) is None
        assert self.ahead(view(0, idle=2.0), other, cost=2.0) == at(0, Trigger.SWITCH)
        assert self.ahead(view(0, idle=9), view(1, state=S.SERVING), cost=2.0) is None

    def test_where_a_switch_does_not_save_nothing_is_saved_ahead_of_it(self) -> None:
        assert self.ahead(view(0, idle=9), view(1), policy=CheckpointPolicy(on_switch=False)) is None


class TestAfterRequest:
    @pytest.mark.parametrize(
        ("policy", "ends", "expected"),
        [
            (CheckpointPolicy(), True, None),
            (CheckpointPolicy(on_turn=True), True, Trigger.TURN),
            (CheckpointPolicy(on_turn=True), False, None),
            (CheckpointPolicy(on_request=True), False, Trigger.REQUEST),
            (CheckpointPolicy(on_request=True, on_turn=True), True, Trigger.REQUEST),
        ],
    )
    def test_a_finished_request_asks_for_the_checkpoint_that_is_set(
        self, policy: CheckpointPolicy, ends: bool, expected: Trigger | None
    ) -> None:
        assert after_request(policy, ends_exchange=ends) is expected


@pytest.mark.parametrize(("tokens", "expected"), [(255, False), (256, True), (None, True), (0, False)])
def test_a_small_slot_is_not_worth_saving_and_one_of_unknown_size_is(
    tokens: int | None, expected: bool
) -> None:
    assert is_worth_saving(tokens, POLICY) is expected
