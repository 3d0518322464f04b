from __future__ import annotations

import pytest

from kvproxy.checkpoint.outcome import CheckpointOutcome, Outcome, RestoreOutcome
from kvproxy.telemetry.events import Event, RestoreProvedIneffective
from kvproxy.telemetry.tally import Tally
from tests.unit.telemetry.samples import MAIN, SESSION, SLOT, checkpoint, every, ready, request, restore


def counted(*events: Event) -> dict[str, int]:
    """What is not zero after these."""
    tally = Tally()
    for event in events:
        tally.hear(event)
    return {name: count for name, count in tally.as_dict().items() if count}


def test_a_new_tally_is_all_zeros() -> None:
    assert set(Tally().as_dict().values()) == {0}


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.PENDING])
def test_a_request_is_counted_by_its_outcome_with_its_tokens(outcome: Outcome) -> None:
    assert counted(request(outcome)) == {
        "requests": 1,
        outcome.value: 1,
        "prompt_tokens_computed": 12,
        "prompt_tokens_reused": 1538,
    }


def test_tokens_that_an_answer_does_not_tell_are_none() -> None:
    assert counted(request(told=False)) == {"requests": 1, "restored": 1}


@pytest.mark.parametrize("outcome", RestoreOutcome)
def test_a_restore_is_one_or_a_failure_or_neither(outcome: RestoreOutcome) -> None:
    expected = {"restores": 1} if outcome is RestoreOutcome.RESTORED else {}
    assert counted(restore(outcome)) == ({"restore_failures": 1} if outcome.is_failure else expected)


@pytest.mark.parametrize("outcome", CheckpointOutcome)
def test_a_save_is_one_or_a_failure_or_without_room_or_none_of_it(outcome: CheckpointOutcome) -> None:
    names = {CheckpointOutcome.PUBLISHED: "saves", CheckpointOutcome.NO_ROOM: "saves_without_room"}
    expected = {names[outcome]: 1} if outcome in names else {}
    assert counted(checkpoint(outcome)) == ({"save_failures": 1} if outcome.is_failure else expected)


def test_a_restore_that_proved_ineffective_is_counted() -> None:
    assert counted(RestoreProvedIneffective(MAIN, SLOT, SESSION, 1538, 0)) == {"ineffective_restores": 1}


def test_the_first_life_of_the_server_is_no_restart() -> None:
    assert counted(ready(), ready(restarted=True)) == {"server_restarts": 1}


def test_it_takes_every_event_there_is() -> None:
    assert counted(*every())["requests"] == 2
