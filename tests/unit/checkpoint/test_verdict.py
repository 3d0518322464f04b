from __future__ import annotations

import pytest

from kvproxy.checkpoint.outcome import Outcome, Verdict
from kvproxy.checkpoint.verdict import verdict_of
from kvproxy.upstream.replies import Usage


def verdict(
    stored: int | None = 1000,
    *,
    computed: int | None = 50,
    reused: int | None = 1000,
    outcome: Outcome = Outcome.RESTORED,
) -> Verdict:
    return verdict_of(outcome, stored, Usage(computed, reused))


@pytest.mark.parametrize("outcome", [Outcome.RESIDENT, Outcome.RESTORED])
def test_a_belief_is_confirmed_by_an_answer_that_reused_what_was_stored(outcome: Outcome) -> None:
    assert verdict(outcome=outcome) is Verdict.CONFIRMED


def test_reuse_of_half_of_what_could_be_shared_still_confirms() -> None:
    assert verdict(1000, computed=500, reused=500) is Verdict.CONFIRMED
    assert verdict(1000, computed=501, reused=499) is Verdict.DIVERGED


def test_a_prompt_shorter_than_what_is_stored_can_share_no_more_than_itself() -> None:
    assert verdict(1000, computed=50, reused=50) is Verdict.CONFIRMED


def test_an_answer_that_reused_nothing_proves_the_belief_wrong() -> None:
    assert verdict(reused=0) is Verdict.INEFFECTIVE


@pytest.mark.parametrize(
    "outcome", [Outcome.COLD, Outcome.SEEDED, Outcome.AUXILIARY, Outcome.BYPASS, Outcome.PENDING]
)
def test_where_nothing_was_believed_nothing_is_proved(outcome: Outcome) -> None:
    assert verdict(outcome=outcome) is Verdict.UNKNOWN


@pytest.mark.parametrize("stored", [None, 0])
def test_where_it_was_not_known_what_is_stored_nothing_is_proved(stored: int | None) -> None:
    assert verdict(stored, reused=0) is Verdict.UNKNOWN


def test_an_answer_that_does_not_tell_proves_nothing() -> None:
    assert verdict(computed=None, reused=None) is Verdict.UNKNOWN
    assert verdict(computed=0, reused=0) is Verdict.UNKNOWN
