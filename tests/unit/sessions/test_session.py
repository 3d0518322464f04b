from __future__ import annotations

import pytest

from kvproxy.identifiers import SlotId
from kvproxy.sessions.session import SessionState, state_of
from kvproxy.slots.slot import SlotView
from kvproxy.slots.state import SlotState
from tests.support.fakes_core import A, stay


def view(state: SlotState, *, is_saved: bool) -> SlotView:
    return SlotView(SlotId(0), state, stay(A, saved=int(is_saved)), False, 0.0, False)


@pytest.mark.parametrize(
    ("state", "is_saved", "shown"),
    [
        (SlotState.RESIDENT, True, SessionState.ACTIVE_CLEAN),
        (SlotState.RESIDENT, False, SessionState.ACTIVE_DIRTY),
        (SlotState.SERVING, False, SessionState.ACTIVE_DIRTY),
        (SlotState.CANCELLING, True, SessionState.ACTIVE_CLEAN),
        (SlotState.SAVING, False, SessionState.SAVING),
        (SlotState.RESTORING, True, SessionState.RESTORING),
    ],
)
def test_a_session_in_a_slot_shows_what_is_done_there(
    state: SlotState, is_saved: bool, shown: SessionState
) -> None:
    assert state_of(view(state, is_saved=is_saved), has_valid=True, has_invalid=True) is shown


@pytest.mark.parametrize(
    ("has_valid", "has_invalid", "shown"),
    [
        (True, True, SessionState.SAVED),
        (True, False, SessionState.SAVED),
        (False, True, SessionState.INVALID),
        (False, False, SessionState.COLD),
    ],
)
def test_a_session_in_no_slot_shows_what_is_stored_of_it(
    has_valid: bool, has_invalid: bool, shown: SessionState
) -> None:
    assert state_of(None, has_valid=has_valid, has_invalid=has_invalid) is shown
