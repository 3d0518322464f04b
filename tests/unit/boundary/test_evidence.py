from __future__ import annotations

import functools

import pytest

from kvproxy.boundary.evidence import (
    OWN_STREAK,
    SERVER_STREAK,
    Evidence,
    Form,
    Observation,
    form_to_use,
)

EXTENDED = Observation(Form.PLAIN, stored=1000, reused=1000, prompt=1100)
REWRITTEN = Observation(Form.PLAIN, stored=1000, reused=900, prompt=1050)
LOST = Observation(Form.PLAIN, stored=1000, reused=0, prompt=1050)


def seen(*observations: Observation) -> Evidence:
    return functools.reduce(Evidence.with_seen, observations, Evidence())


def form(*session: Observation, server: Evidence | None = None, may_roll_back: bool = False) -> Form:
    return form_to_use(seen(*session), server or Evidence(), may_roll_back=may_roll_back)


@pytest.mark.parametrize("observation", [EXTENDED, REWRITTEN, LOST])
def test_full_attention_never_pays_for_a_boundary(observation: Observation) -> None:
    assert form(*[observation] * 9, may_roll_back=True) is Form.PLAIN


def test_without_evidence_the_boundary_is_the_form() -> None:
    assert form() is Form.BOUNDARY


def test_a_session_whose_replies_come_back_unchanged_is_served_plain() -> None:
    assert form(*[EXTENDED] * (OWN_STREAK - 1)) is Form.BOUNDARY
    assert form(*[EXTENDED] * OWN_STREAK) is Form.PLAIN


@pytest.mark.parametrize("miss", [REWRITTEN, LOST])
def test_one_rewritten_reply_outweighs_all_before_it(miss: Observation) -> None:
    assert form(*[EXTENDED] * 50, miss) is Form.BOUNDARY
    assert form(*[EXTENDED] * 50, miss, *[EXTENDED] * OWN_STREAK) is Form.PLAIN


def test_a_new_session_is_served_as_the_servers_sessions_were() -> None:
    assert form(server=seen(*[EXTENDED] * (SERVER_STREAK - 1))) is Form.BOUNDARY
    trusted = seen(*[EXTENDED] * SERVER_STREAK)
    assert form(server=trusted) is Form.PLAIN
    assert form(server=seen(*[EXTENDED] * SERVER_STREAK, REWRITTEN)) is Form.BOUNDARY


def test_a_sessions_own_rewrite_counts_for_more_than_the_others() -> None:
    trusted = seen(*[EXTENDED] * SERVER_STREAK)
    assert form(EXTENDED, server=trusted) is Form.PLAIN
    assert form(REWRITTEN, server=trusted) is Form.BOUNDARY
    assert form(REWRITTEN, *[EXTENDED] * (OWN_STREAK - 1), server=trusted) is Form.BOUNDARY


@pytest.mark.parametrize(
    "silent",
    [
        Observation(Form.BOUNDARY, stored=1000, reused=1000, prompt=1100),
        Observation(Form.BOUNDARY, stored=1000, reused=0, prompt=1100),
        Observation(Form.PLAIN, stored=1000, reused=20, prompt=200),
        Observation(Form.PLAIN, stored=0, reused=0, prompt=200),
    ],
)
def test_what_says_nothing_of_replies_changes_nothing(silent: Observation) -> None:
    for before in (seen(EXTENDED), seen(REWRITTEN), Evidence()):
        assert before.with_seen(silent) == before


def test_the_last_token_of_an_answer_may_be_counted_or_not() -> None:
    assert Observation(Form.PLAIN, stored=1000, reused=999, prompt=1100).extends
    assert not Observation(Form.PLAIN, stored=1000, reused=998, prompt=1100).extends
