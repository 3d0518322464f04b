"""The life of a slot: the only table by which a slot's state may change.

A slot's state says what may be done with it now. Two things are deliberately no states: whether a lease
is out on it (the desk knows), and whether its occupant is dirty (arithmetic on revisions).

UNKNOWN      nothing is believed: a new life of the server, or none yet. Left only by seeing it idle.
IDLE         not processing, and no session of ours lives in it (it may hold leftovers).
RESTORING    a restore is on its way.
RESIDENT     not processing, and its occupant's KV is in it.
SERVING      a request of ours runs in it.
CANCELLING   its request was dropped; the server may still be computing. Left only by seeing it idle.
SAVING       a save is on its way.
QUARANTINED  a slot action went past its deadline and may still run: what the slot holds is not to be
             believed, and nothing of it is to be saved, until the action's fate is known.

An event that a state does not list is a bug in the caller: `advance` raises and nothing has changed.
"""

from __future__ import annotations

from enum import StrEnum

from kvproxy.errors import InvariantError


class SlotState(StrEnum):
    UNKNOWN = "unknown"
    IDLE = "idle"
    RESTORING = "restoring"
    RESIDENT = "resident"
    SERVING = "serving"
    CANCELLING = "cancelling"
    SAVING = "saving"
    QUARANTINED = "quarantined"


UNDER_WAY = (SlotState.SERVING, SlotState.CANCELLING)
"""A request of ours runs there, for all we know."""
AT_REST = (SlotState.IDLE, SlotState.RESIDENT)


class SlotEvent(StrEnum):
    SEEN_IDLE = "seen_idle"
    SERVE = "serve"
    KEPT = "kept"
    """The request ended and the occupant's KV is there."""
    LOST = "lost"
    """Whatever the slot holds now is nobody's."""
    BROKEN_OFF = "broken_off"
    SAVE = "save"
    SAVE_ENDED = "save_ended"
    RESTORE = "restore"
    RESTORED = "restored"
    NOT_RESTORED = "not_restored"
    DOUBTED = "doubted"
    FATE_KNOWN = "fate_known"
    VOIDED = "voided"


_S, _E = SlotState, SlotEvent

TRANSITIONS: dict[SlotState, dict[SlotEvent, SlotState]] = {
    _S.UNKNOWN: {_E.SEEN_IDLE: _S.IDLE},
    _S.IDLE: {
        _E.SERVE: _S.SERVING,
        _E.RESTORE: _S.RESTORING,
        # an erase went past its deadline
        _E.DOUBTED: _S.QUARANTINED,
        _E.LOST: _S.IDLE,
    },
    _S.RESTORING: {
        _E.RESTORED: _S.RESIDENT,
        _E.NOT_RESTORED: _S.IDLE,
        _E.DOUBTED: _S.QUARANTINED,
    },
    _S.RESIDENT: {_E.SERVE: _S.SERVING, _E.SAVE: _S.SAVING, _E.LOST: _S.IDLE},
    _S.SERVING: {
        _E.KEPT: _S.RESIDENT,
        _E.LOST: _S.IDLE,
        _E.BROKEN_OFF: _S.CANCELLING,
        # served while an action's fate was open, and it still is
        _E.DOUBTED: _S.QUARANTINED,
    },
    _S.CANCELLING: {_E.KEPT: _S.RESIDENT, _E.LOST: _S.IDLE, _E.DOUBTED: _S.QUARANTINED},
    _S.SAVING: {_E.SAVE_ENDED: _S.RESIDENT, _E.DOUBTED: _S.QUARANTINED},
    # A late save must not hold a conversation: FIFO in the server puts the request behind the action.
    _S.QUARANTINED: {_E.FATE_KNOWN: _S.IDLE, _E.SERVE: _S.SERVING},
}


def advance(state: SlotState, event: SlotEvent) -> SlotState:
    """The state after `event`. Raises InvariantError for one that `state` does not admit."""
    if event is SlotEvent.VOIDED:
        return SlotState.UNKNOWN
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise InvariantError(f"a slot that is {state} does not admit {event}") from None
