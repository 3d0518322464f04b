from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.snapshots.canary import TOLERANCE, Canary

BASE = Canary.of([(7, -0.5), (9, -1.5), (3, -2.5)])

LOGPROBS = st.dictionaries(st.integers(0, 20), st.floats(-1e39, 0), min_size=1, max_size=8)
CANARIES = LOGPROBS.map(lambda logprobs: Canary.of(logprobs.items()))


def test_a_canary_lists_the_likeliest_first_whatever_the_order_told() -> None:
    assert Canary.of([(3, -2.5), (7, -0.5), (9, -1.5)]) == BASE
    assert BASE.logprobs == ((7, -0.5), (9, -1.5), (3, -2.5))


def test_of_equally_likely_tokens_the_lower_id_comes_first() -> None:
    assert Canary.of([(9, -1.0), (2, -1.0)]).logprobs == ((2, -1.0), (9, -1.0))


@pytest.mark.parametrize("logprobs", [[], [(1, math.nan)], [(1, -0.5), (2, math.inf)]])
def test_what_lists_no_numbers_is_no_canary(logprobs: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="no log-probabilities"):
        Canary.of(logprobs)


@given(CANARIES)
def test_a_canary_survives_the_way_through_json(canary: Canary) -> None:
    assert Canary.from_dict(json.loads(json.dumps(canary.as_dict()))) == canary


@pytest.mark.parametrize("kept", [{}, {"x": -1.0}, {"1": "x"}, {"1": None}, {"1": math.nan}])
def test_a_damaged_form_is_refused(kept: dict[str, float]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Canary.from_dict(kept)


@given(CANARIES, CANARIES)
def test_the_difference_is_the_same_from_both_sides(one: Canary, other: Canary) -> None:
    assert one.difference(other) == other.difference(one) >= 0


@given(CANARIES)
def test_a_canary_differs_from_itself_by_nothing(canary: Canary) -> None:
    assert canary.difference(canary) == 0
    assert canary.matches(canary, tolerance=0)


def test_the_difference_is_that_of_the_token_that_moved_most() -> None:
    moved = Canary.of([(7, -0.75), (9, -1.5), (3, -2.0)])
    assert BASE.difference(moved) == pytest.approx(0.5)


def test_a_token_only_one_side_lists_differs_at_least_by_what_it_is_above_the_others_last() -> None:
    other = Canary.of([(7, -0.5), (4, -1.0), (9, -1.5)])
    assert BASE.difference(other) == pytest.approx(1.5)


def test_two_that_would_take_the_last_place_alike_do_not_differ() -> None:
    """Token 3 has the last place by a hair here, token 5 there."""
    other = Canary.of([(7, -0.5), (9, -1.5), (5, -2.49999)])
    assert BASE.difference(other) == pytest.approx(0.00001)
    assert BASE.matches(other)


def test_impossible_tokens_are_all_alike() -> None:
    one, other = Canary.of([(1, 0.0), (2, -3.4e38)]), Canary.of([(1, 0.0), (2, -90.0)])
    assert one.matches(other, tolerance=0)


def test_the_tolerance_lies_between_noise_and_the_smallest_real_change_seen() -> None:
    busy, flash_attention = 2.5e-6, 8.2e-4
    assert 10 * busy < TOLERANCE < flash_attention / 5


def test_up_to_the_tolerance_canaries_match() -> None:
    nearby = Canary.of([(7, -0.5), (9, -1.75), (3, -2.5)])
    assert BASE.matches(nearby, tolerance=0.25)
    assert not BASE.matches(nearby, tolerance=0.2)
    assert not BASE.matches(nearby)
