from __future__ import annotations

import pytest

from kvproxy.identifiers import SlotId
from kvproxy.slots.slot import SlotView
from kvproxy.slots.state import SlotState
from kvproxy.slots.want import Purpose, Want, any_in_hand, choose
from tests.support.fakes_core import A, B, stay

S0, S1 = SlotId(0), SlotId(1)


def view(slot: SlotId, *, state: SlotState = SlotState.IDLE, is_leased: bool = False) -> SlotView:
    return SlotView(slot, state, None, is_leased, 0.0, True)


def running(slot: SlotId, *, is_underway: bool = True) -> SlotView:
    return SlotView(slot, SlotState.SERVING, stay(A), True, 0.0, False, is_underway)


def test_a_pinned_one_gets_one_slot() -> None:
    assert choose(Want(Purpose.PINNED, B), [view(S0), view(S1)]) == ((S0,), False)
    assert choose(Want(Purpose.PINNED, B), [running(S0)]) is None


def test_a_second_request_of_a_session_is_a_fork() -> None:
    assert choose(Want(Purpose.PINNED, A), [running(S0), view(S1)]) == ((S1,), True)


def test_a_second_request_waits_while_a_slot_is_made_ready_for_its_session() -> None:
    views = [view(S0, is_leased=True), view(S1)]
    assert choose(Want(Purpose.PINNED, A), views, [A]) is None
    assert choose(Want(Purpose.PINNED, B), views, [A]) == ((S1,), False)
    assert choose(Want(Purpose.PINNED), views, [A]) == ((S1,), False)


def test_a_floating_one_gets_all_that_are_free_if_nothing_is_on_its_way() -> None:
    want = Want(Purpose.FLOATING)
    assert choose(want, [running(S0), view(S1)]) == ((S1,), False)
    assert choose(want, [running(S0, is_underway=False), view(S1)]) is None
    assert choose(want, [running(S0)]) is None


def test_an_exclusive_one_gets_all_or_nothing() -> None:
    want = Want(Purpose.EXCLUSIVE)
    assert choose(want, [view(S0), view(S1)]) == ((S0, S1), False)
    assert choose(want, [running(S0), view(S1)]) is None
    assert choose(want, []) is None


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        ([view(S0), running(S1)], False),
        ([view(S0, is_leased=True)], True),
        ([view(S0, state=SlotState.CANCELLING)], True),
        ([running(S0, is_underway=False)], True),
    ],
)
def test_what_the_server_may_not_know_of_yet_is_in_hand(views: list[SlotView], expected: bool) -> None:
    assert any_in_hand(views) is expected
