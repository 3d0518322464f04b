from __future__ import annotations

from collections import deque
from itertools import product
from pathlib import Path

import pytest

from kvproxy.errors import InvariantError
from kvproxy.slots.state import TRANSITIONS, SlotEvent, SlotState, advance

DOCUMENT = Path(__file__).parents[3] / "docs" / "slots.md"

LISTED = {(state, event): after for state, row in TRANSITIONS.items() for event, after in row.items()}
ILLEGAL = [
    (state, event)
    for state, event in product(SlotState, SlotEvent)
    if (state, event) not in LISTED and event is not SlotEvent.VOIDED
]


def arrows() -> list[tuple[str, SlotState, SlotEvent, SlotState]]:
    """Every arrow with its letter, in the order of the table."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    assert len(LISTED) <= len(letters)
    return [(letters[n], *pair, after) for n, (pair, after) in enumerate(LISTED.items())]


def diagram() -> str:
    lines = [f"    {state} --> {after} : {letter}" for letter, state, _, after in arrows()]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> unknown", *lines, "```"])


def rows() -> list[str]:
    """How the table below the diagram begins, one line for each arrow."""
    return [f"| {letter} | {state} | `{event}` | {after} |" for letter, state, event, after in arrows()]


@pytest.mark.parametrize(("state", "event"), LISTED)
def test_a_listed_event_leads_where_the_table_says(state: SlotState, event: SlotEvent) -> None:
    assert advance(state, event) is TRANSITIONS[state][event]


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_an_event_that_a_state_does_not_list_is_a_bug(state: SlotState, event: SlotEvent) -> None:
    with pytest.raises(InvariantError, match=f"is {state} does not admit {event}"):
        advance(state, event)


@pytest.mark.parametrize("state", SlotState)
def test_nothing_is_believed_of_a_slot_whose_life_has_passed(state: SlotState) -> None:
    assert advance(state, SlotEvent.VOIDED) is SlotState.UNKNOWN


def test_the_table_has_a_row_for_every_state() -> None:
    assert set(TRANSITIONS) == set(SlotState)


def test_every_event_but_the_end_of_a_life_is_listed_somewhere() -> None:
    assert {event for _, event in LISTED} == set(SlotEvent) - {SlotEvent.VOIDED}


@pytest.mark.parametrize("state", SlotState)
def test_every_state_can_be_reached_and_leads_back_to_idle(state: SlotState) -> None:
    assert state in _reachable(SlotState.UNKNOWN)
    assert SlotState.IDLE in _reachable(state)


def _reachable(start: SlotState) -> set[SlotState]:
    seen, todo = {start}, deque([start])
    while todo:
        for after in TRANSITIONS[todo.popleft()].values():
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


def test_a_slot_of_which_nothing_is_known_serves_only_after_it_was_seen_idle() -> None:
    assert list(TRANSITIONS[SlotState.UNKNOWN]) == [SlotEvent.SEEN_IDLE]


def test_the_document_draws_the_table_as_it_is() -> None:
    assert diagram() in DOCUMENT.read_text("utf-8"), f"the diagram should be:\n{diagram()}"


def test_the_document_explains_every_arrow() -> None:
    text = DOCUMENT.read_text("utf-8")
    missing = [row for row in rows() if row not in text]
    assert not missing, "each of these begins a line of the table, followed by what it means:\n" + "\n".join(
        missing
    )
    assert text.count("\n| ") == len(rows()) + 1, "the table explains an arrow that is none"


def test_the_document_names_every_state() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert all(f"**{state}**" in text for state in SlotState)
