from __future__ import annotations

import pytest

from kvproxy.identifiers import SlotId
from kvproxy.slots.cells import has_room, may_run, next_to_empty
from kvproxy.slots.slot import Occupancy, SlotView
from kvproxy.slots.state import SlotState
from tests.support.fakes_core import A, stay

POOL = 1000
S0, S1, S2 = SlotId(0), SlotId(1), SlotId(2)


def view(
    slot: SlotId,
    cells: int = 0,
    state: SlotState = SlotState.IDLE,
    occupancy: Occupancy | None = None,
    *,
    leased: bool = False,
    used: float = 0.0,
) -> SlotView:
    return SlotView(slot, state, occupancy, leased, used, cells == 0, cells=cells)


def serving(slot: SlotId, cells: int) -> SlotView:
    return view(slot, cells, SlotState.SERVING, stay(A), leased=True)


def resident(slot: SlotId, cells: int, *, is_dirty: bool = False, used: float = 0.0) -> SlotView:
    occupancy = stay(A, revision=1, saved=0 if is_dirty else 1, tokens=cells)
    return view(slot, cells, SlotState.RESIDENT, occupancy, used=used)


class TestWhetherARequestMayRun:
    @pytest.mark.parametrize(("need", "may"), [(400, True), (401, False)])
    def test_it_may_beside_others_as_far_as_all_fit_at_their_ends(self, need: int, may: bool) -> None:
        views = [view(S0), serving(S1, 350), serving(S2, 250)]
        assert may_run(POOL, need, (S0,), views) is may

    def test_idle_slots_are_not_in_its_way(self) -> None:
        assert may_run(POOL, 600, (S0,), [view(S0), serving(S1, 400), resident(S2, 900)])

    def test_alone_it_always_may_even_if_it_will_not_fit(self) -> None:
        assert may_run(POOL, 10 * POOL, (S0,), [view(S0), resident(S1, 900), view(S2, 500)])

    @pytest.mark.parametrize(
        "at_work",
        [
            view(S1, 600, SlotState.CANCELLING),
            view(S1, 600, SlotState.SAVING, stay(A), leased=True),
            view(S1, 600, SlotState.RESTORING, leased=True),
            view(S1, 600, SlotState.RESIDENT, stay(A), leased=True),
        ],
        ids=["dropped, still running", "being saved", "being restored", "about to be sent"],
    )
    def test_whatever_is_at_work_counts(self, at_work: SlotView) -> None:
        assert not may_run(POOL, 500, (S0,), [view(S0), at_work])
        assert may_run(POOL, 400, (S0,), [view(S0), at_work])

    @pytest.mark.parametrize("state", [SlotState.UNKNOWN, SlotState.QUARANTINED])
    def test_a_slot_that_may_stay_so_for_ever_holds_nobody_back(self, state: SlotState) -> None:
        assert may_run(POOL, 900, (S0,), [view(S0), view(S1, 600, state)])

    def test_what_its_own_slot_holds_does_not_count_twice(self) -> None:
        assert may_run(POOL, 800, (S0,), [resident(S0, 700), serving(S1, 200)])


class TestWhichSlotToEmpty:
    def test_none_where_there_is_room(self) -> None:
        assert has_room(POOL, 500, S0, [view(S0), resident(S1, 500)])
        assert next_to_empty(POOL, 500, S0, [view(S0), resident(S1, 500)]) is None

    def test_nobodys_first_then_the_saved_then_the_dirty(self) -> None:
        dirty, saved, nobodys = resident(S1, 400, is_dirty=True), resident(S2, 400), view(SlotId(3), 400)
        views = [view(S0), dirty, saved, nobodys]
        assert next_to_empty(POOL, 500, S0, views) == 3
        assert next_to_empty(POOL, 500, S0, views[:3]) == S2
        assert next_to_empty(POOL, 700, S0, views[:2]) == S1

    def test_of_equals_the_one_that_was_used_least_recently(self) -> None:
        views = [view(S0), resident(S1, 600, used=2.0), resident(S2, 600, used=1.0)]
        assert next_to_empty(POOL, 300, S0, views) == S2

    def test_its_own_a_held_a_running_and_an_empty_slot_are_never_chosen(self) -> None:
        held = view(S2, 300, SlotState.RESIDENT, stay(A), leased=True)
        views = [resident(S0, 900), serving(S1, 500), held, view(SlotId(3), 0)]
        assert next_to_empty(POOL, 900, S0, views) is None

    def test_one_that_could_not_be_emptied_is_not_tried_again(self) -> None:
        views = [view(S0), resident(S1, 600), resident(S2, 600)]
        assert next_to_empty(POOL, 900, S0, views, {S1}) == S2
        assert next_to_empty(POOL, 900, S0, views, {S1, S2}) is None
