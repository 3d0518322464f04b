from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvproxy.identifiers import SlotId
from kvproxy.slots.living import (
    Living,
    LivingSlot,
    decode,
    encode,
    living_slot,
    proven,
    wants_look,
    were_slept_away,
)
from kvproxy.slots.slot import Sight, SlotView, Stump
from kvproxy.slots.state import SlotState
from tests.support.fakes_core import MAIN, PROPS, A, B, idle, processing, stay

S0 = SlotId(0)


def view(**changes: Any) -> SlotView:
    """A rests dirty in slot 0, which was seen to have run task 7 last and to hold 900 tokens."""
    made = SlotView(S0, SlotState.RESIDENT, stay(A, revision=3, saved=2), False, 0.0, False)
    return replace(made, sight=Sight(7, 900), **changes)


def living(*slots: LivingSlot, **changes: Any) -> Living:
    made = Living(server=MAIN, marker=PROPS.marker, slots=slots or (noted(),))
    return made.model_copy(update=changes)


def noted(**changes: Any) -> LivingSlot:
    one = living_slot(view(), "d" * 32, "/models/one.gguf")
    assert one is not None
    return one.model_copy(update=changes)


SAME = (idle(0, task=7, tokens=900),)


def test_what_is_written_is_what_is_read() -> None:
    assert decode(encode(living())) == living()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema_version": 2}', b"\xff", b'{"server": "main"}'])
def test_what_is_no_record_is_none(data: bytes) -> None:
    assert decode(data) is None


def test_a_stay_goes_on_as_it_was() -> None:
    assert noted().occupancy(5.0) == replace(stay(A, revision=3, saved=2), dirty_since=5.0)
    clean = noted(checkpointed_revision=3).occupancy(5.0)
    assert (clean.is_dirty, clean.dirty_since) == (False, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": SlotState.SERVING},
        {"state": SlotState.CANCELLING},
        {"state": SlotState.QUARANTINED},
        {"occupancy": None},
    ],
)
def test_only_a_session_at_rest_is_written_down(changes: dict[str, Any]) -> None:
    assert living_slot(view(**changes), "", "") is None


@pytest.mark.parametrize("sight", [None, Sight(None, 900), Sight(7, None), Sight(7, 0)])
def test_without_task_and_tokens_nothing_could_be_proven(sight: Sight | None) -> None:
    assert living_slot(replace(view(), sight=sight), "", "") is None


def test_a_slot_that_is_being_saved_is_at_rest() -> None:
    assert living_slot(view(state=SlotState.SAVING), "", "") is not None


def test_the_same_task_and_tokens_in_the_same_life_are_a_proof() -> None:
    assert proven(living(), MAIN, PROPS, SAME) == (noted(),)


@pytest.mark.parametrize(
    "infos",
    [
        (),
        (idle(0, task=8, tokens=900),),
        (idle(0, task=7, tokens=901),),
        (idle(0, task=7),),
        (idle(0),),
        (replace(processing(0, task=7), n_prompt_tokens=900),),
        (idle(1, task=7, tokens=900),),
    ],
    ids=["no such slot", "another task", "other tokens", "no tokens", "nothing", "it runs", "another slot"],
)
def test_anything_else_in_the_slot_is_none(infos: tuple[Any, ...]) -> None:
    assert proven(living(), MAIN, PROPS, infos) == ()


@pytest.mark.parametrize(
    ("changes", "props"),
    [
        ({"marker": "<__media_2__>"}, PROPS),
        ({"server": "other"}, PROPS),
        ({"marker": "<__media__>"}, replace(PROPS, marker="<__media__>")),
        ({"marker": ""}, replace(PROPS, marker="")),
        ({}, replace(PROPS, is_sleeping=True)),
    ],
    ids=["another life", "another server", "a marker that never changes", "no marker", "asleep"],
)
def test_any_doubt_about_the_life_is_none(changes: dict[str, Any], props: Any) -> None:
    assert proven(living(**changes), MAIN, props, SAME) == ()


def test_no_session_lives_twice() -> None:
    twice = living(noted(), noted(slot=SlotId(1)))
    infos = (*SAME, idle(1, task=7, tokens=900))
    assert len(proven(twice, MAIN, PROPS, infos)) == 1
    both = living(noted(), noted(slot=SlotId(1), session=B))
    assert len(proven(both, MAIN, PROPS, infos)) == 2


def test_a_look_is_wanted_where_somebody_rests_unseen() -> None:
    unseen = replace(view(), sight=None)
    assert wants_look([view(), unseen])
    assert not wants_look([view(), replace(unseen, state=SlotState.SERVING)])
    assert not wants_look([replace(view(), sight=Sight(None, None))])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"last_used": 1.0}, False),
        ({"state": SlotState.SERVING}, False),
        ({"is_leased": True}, False),
        ({"occupancy": stay(A, revision=3, saved=3)}, False),
        ({"occupancy": stay(A, revision=3, saved=2, tokens=None)}, False),
        ({"occupancy": None}, False),
    ],
    ids=["an answer", "too late", "in use", "held", "perhaps only restored", "perhaps never run", "nobody"],
)
def test_a_slot_that_an_answer_filled_and_that_ran_nothing_was_slept_away(
    changes: dict[str, Any], expected: bool
) -> None:
    assert were_slept_away([replace(view(), **changes)], (idle(0),), 1.0) is expected
    assert not were_slept_away([replace(view(), **changes)], SAME, 1.0)


def test_a_slot_of_whose_window_only_the_end_is_there_is_not_written_down() -> None:
    held = replace(stay(A, revision=3, saved=2), stump=Stump(100, None))
    assert living_slot(view(occupancy=held), "", "") is None
