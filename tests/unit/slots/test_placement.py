from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.identifiers import SessionKey, SlotId
from kvproxy.slots.placement import Placement, place
from kvproxy.slots.slot import Occupancy, SlotView
from kvproxy.slots.state import SlotState
from tests.support.fakes_core import A, B, C, stay

S = SlotState


def view(
    slot: int,
    state: SlotState = S.IDLE,
    occupancy: Occupancy | None = None,
    *,
    is_leased: bool = False,
    used: float = 0.0,
    is_blank: bool = False,
) -> SlotView:
    return SlotView(SlotId(slot), state, occupancy, is_leased, used, is_blank)


def clean(slot: int, key: SessionKey, used: float = 0.0) -> SlotView:
    return view(slot, S.RESIDENT, stay(key, saved=1), used=used)


def dirty(slot: int, key: SessionKey, used: float = 0.0) -> SlotView:
    return view(slot, S.RESIDENT, stay(key), used=used)


def at(slot: int, *, is_fork: bool = False) -> Placement:
    return Placement(SlotId(slot), is_fork)


def test_a_sessions_own_slot_is_taken_before_any_better_looking_one() -> None:
    assert place(A, [view(0, is_blank=True), dirty(1, A)]) == at(1)


@pytest.mark.parametrize("state", [S.SAVING, S.RESTORING, S.CANCELLING])
def test_a_session_waits_for_its_own_slot_while_something_is_done_to_it(state: SlotState) -> None:
    own = view(1, state, stay(A), is_leased=state is not S.CANCELLING)
    assert place(A, [view(0, is_blank=True), own]) is None


def test_a_session_waits_for_its_own_slot_while_another_holds_it() -> None:
    assert place(A, [view(0), view(1, S.RESIDENT, stay(A), is_leased=True)]) is None


def test_a_second_request_of_a_session_that_is_being_served_goes_elsewhere_and_owns_nothing() -> None:
    serving = view(0, S.SERVING, stay(A), is_leased=True)

    assert place(A, [serving, view(1)]) == at(1, is_fork=True)
    assert place(A, [serving]) is None


def test_a_blank_slot_comes_before_one_with_leftovers_and_both_before_anybodys() -> None:
    views = [clean(0, B), view(1), view(2, is_blank=True, used=9.0), dirty(3, C)]

    assert [place(A, left) for left in (views, views[:2], views[:1])] == [at(2), at(1), at(0)]


def test_a_clean_occupant_leaves_before_a_dirty_one_however_recent() -> None:
    assert place(A, [dirty(0, B, used=1.0), clean(1, C, used=9.0)]) == at(1)


def test_the_least_recently_used_of_equals_leaves() -> None:
    assert place(A, [clean(0, B, used=5.0), clean(1, C, used=4.0)]) == at(1)
    assert place(A, [dirty(0, B, used=5.0), dirty(1, C, used=4.0)]) == at(1)


def test_a_quarantined_slot_is_used_when_no_other_is_left() -> None:
    doubted = view(0, S.QUARANTINED)

    assert place(A, [doubted, view(1, S.SERVING, is_leased=True)]) == at(0)
    assert place(A, [doubted, dirty(1, B)]) == at(1)
    assert place(A, [view(0, S.QUARANTINED, is_leased=True)]) is None


def test_a_request_of_nobody_takes_what_a_stranger_would() -> None:
    assert place(None, [dirty(0, B), view(1)]) == at(1)


def test_a_request_of_nobody_leaves_blank_slots_to_the_conversations() -> None:
    views = [view(0, is_blank=True), view(1, used=1.0), view(2, used=2.0), clean(3, B)]
    assert place(None, views) == at(2)
    assert place(None, [view(0, is_blank=True), clean(1, B)]) == at(0)


def test_slots_that_are_set_apart_are_for_requests_of_nobody() -> None:
    views = [clean(0, B), view(1, S.SERVING, stay(C), is_leased=True), view(2, is_blank=True)]
    assert place(None, views, apart=1) == at(2)
    assert place(A, views, apart=1) == at(0)
    assert place(A, views[1:], apart=1) is None
    assert place(C, views, apart=1) == at(0, is_fork=True)


def test_a_request_of_nobody_goes_elsewhere_where_those_are_busy() -> None:
    assert place(None, [clean(0, B), view(1, S.SERVING, is_leased=True)], apart=1) == at(0)


def test_not_all_slots_are_set_apart() -> None:
    assert place(A, [view(0)], apart=7) == at(0)


def test_there_is_no_place_where_there_are_no_slots() -> None:
    assert place(A, []) is None


views_of_any_kind = st.lists(
    st.tuples(
        st.sampled_from(SlotState),
        st.sampled_from([None, A, B, C]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.floats(0, 100),
    ),
    max_size=5,
).map(
    lambda rows: [
        view(n, state, stay(key, saved=saved) if key else None, is_leased=held, is_blank=blank, used=used)
        for n, (state, key, saved, held, blank, used) in enumerate(rows)
    ]
)


@given(st.sampled_from([None, A, B]), views_of_any_kind)
def test_no_slot_is_given_that_is_held_or_in_which_something_runs(
    session: SessionKey | None, views: list[SlotView]
) -> None:
    placement = place(session, views)
    if placement is not None:
        chosen = views[placement.slot]
        assert not chosen.is_leased
        assert chosen.state in (S.IDLE, S.RESIDENT, S.QUARANTINED)
        assert chosen.is_free or not any(one.is_free for one in views)


@given(st.sampled_from([A, B]), views_of_any_kind)
def test_a_session_is_never_brought_to_a_second_slot_but_as_a_fork(
    session: SessionKey, views: list[SlotView]
) -> None:
    placement = place(session, views)
    homes = [one.id for one in views if one.occupant == session]
    if placement is not None and homes:
        assert placement.is_fork or placement.slot in homes
