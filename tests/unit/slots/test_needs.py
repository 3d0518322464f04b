from __future__ import annotations

import pytest

from kvproxy.slots.needs import LEAST_ANSWER_TOKENS, NOTHING, TEMPLATE_TOKENS, Measure, Needs, answer_limit

POOL = 100_000


def test_before_anything_is_known_each_byte_is_a_token() -> None:
    assert Needs().of(5000, 100, None, POOL).thought == 5000 + TEMPLATE_TOKENS + 100


def test_answers_teach_how_dense_text_is_and_the_densest_counts() -> None:
    needs = Needs()
    needs.learn(Measure(4000, 1000), 5, 10)
    assert needs.of(8000, 0, None, POOL).thought == 2000 + TEMPLATE_TOKENS
    needs.learn(Measure(4000, 2000), 5, 10)
    needs.learn(Measure(4000, 1000), 5, 10)
    assert needs.of(8000, 0, None, POOL).thought == 4000 + TEMPLATE_TOKENS


def test_a_short_request_is_mostly_template_and_teaches_nothing() -> None:
    needs = Needs()
    needs.learn(Measure(60, 35), 5, 10)
    assert needs.of(8000, 0, None, POOL).thought == 8000 + TEMPLATE_TOKENS


def test_of_a_known_conversation_only_what_is_new_is_reckoned() -> None:
    needs = Needs()
    needs.learn(Measure(4000, 2000), 5, 10)
    assert needs.of(5000, 0, Measure(4000, 1000), POOL).thought == 1000 + 500


def test_one_that_became_shorter_is_reckoned_anew() -> None:
    assert Needs().of(3000, 0, Measure(4000, 1000), POOL).thought == 3000 + TEMPLATE_TOKENS


def test_an_answer_without_a_limit_counts_as_the_longest_of_those_that_had_none() -> None:
    needs = Needs()
    assert needs.of(0, None, None, POOL).thought == TEMPLATE_TOKENS + LEAST_ANSWER_TOKENS
    needs.learn(Measure(100, 50), 9000, limit=9000)
    assert needs.of(0, None, None, POOL).thought == TEMPLATE_TOKENS + LEAST_ANSWER_TOKENS
    needs.learn(Measure(100, 50), 9000, limit=None)
    assert needs.of(0, None, None, POOL).thought == TEMPLATE_TOKENS + 9000


def test_where_the_room_was_not_enough_such_answers_are_given_twice_of_all_that_was_reckoned() -> None:
    needs = Needs()
    for _ in range(2):  # each of those that failed together says so
        needs.fell_short(3000)
    assert needs.of(0, None, None, POOL).thought == TEMPLATE_TOKENS + 6000
    needs.fell_short(0)
    assert needs.of(0, None, None, POOL).thought == TEMPLATE_TOKENS + 6000
    assert needs.shortfalls == 3


def test_never_more_than_there_is_so_that_it_can_run_alone() -> None:
    assert Needs().of(10**9, 10**9, None, POOL).thought == POOL


def test_where_slots_share_nothing_nobody_needs_to_know() -> None:
    assert Needs().of(5000, 100, None, None) == NOTHING


@pytest.mark.parametrize(
    ("document", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_output_tokens": 7}, 7),
        ({"n_predict": 8, "max_tokens": 5}, 8),
        ({"n_predict": -1}, None),
        ({"max_tokens": "9"}, None),
        ({"max_tokens": True}, None),
        ({}, None),
        (None, None),
    ],
)
def test_the_limit_is_the_largest_that_the_client_states(document: object, limit: int | None) -> None:
    assert answer_limit(document) == limit


def test_at_worst_an_answer_without_a_limit_takes_all_there_is() -> None:
    assert Needs().of(0, None, None, POOL).at_worst == POOL
    limited = Needs().of(0, 10, None, POOL)
    assert limited.at_worst == limited.thought
