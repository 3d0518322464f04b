from __future__ import annotations

from dataclasses import replace

import pytest

from kvproxy.upstream.facts import (
    Facts,
    Persistence,
    PersistenceMode,
    ServerState,
    Standing,
)
from tests.support.fakes_core import PROPS


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (ServerState.HEALTHY, True),
        (ServerState.DEGRADED, True),
        (ServerState.SLEEPING, True),
        (ServerState.LOADING, False),
        (ServerState.UNREACHABLE, False),
    ],
)
def test_slots_may_be_leased_of_a_server_that_serves_or_wakes_by_the_request(
    state: ServerState, expected: bool
) -> None:
    assert state.has_slots is expected


@pytest.mark.parametrize("mode", PersistenceMode)
def test_slots_can_be_saved_where_that_was_proved(mode: PersistenceMode) -> None:
    assert Persistence(mode).is_on is (mode in (PersistenceMode.PLAIN, PersistenceMode.BOUNDARY))


def test_before_the_server_was_asked_nothing_is_known_of_it() -> None:
    facts = Standing().facts
    assert (facts.state, facts.model, facts.n_ctx) == (ServerState.UNREACHABLE, "", None)
    assert not facts.persistence.is_on


def test_a_model_is_known_by_its_path_which_an_alias_does_not_change() -> None:
    assert Facts(props=PROPS).model == PROPS.model_path
    assert Facts(props=PROPS).n_ctx == 4096


def test_facts_are_replaced_and_those_read_before_stay_as_they_were() -> None:
    standing = Standing()
    before = standing.facts
    standing.set(state=ServerState.HEALTHY, reason="")

    assert (before.state, standing.facts.state) == (ServerState.UNREACHABLE, ServerState.HEALTHY)
    assert standing.facts.persistence == before.persistence


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts(props=PROPS), ServerState.HEALTHY),
        (Facts(props=PROPS, is_volatile=True), ServerState.DEGRADED),
        (Facts(props=PROPS, persistence=Persistence(PersistenceMode.OFF, "no")), ServerState.DEGRADED),
        (Facts(props=replace(PROPS, is_sleeping=True), is_volatile=True), ServerState.SLEEPING),
    ],
)
def test_a_server_that_answers_is_as_good_as_what_it_allows(facts: Facts, expected: ServerState) -> None:
    assert facts.as_is()["state"] is expected
