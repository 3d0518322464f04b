from __future__ import annotations

from kvproxy.sessions.newcomers import MOST_UNCONTINUED, Newcomers


def test_many_chats_that_are_opened_before_one_goes_on_are_all_kept() -> None:
    newcomers = Newcomers()
    assert not any(newcomers.began() for _ in range(MOST_UNCONTINUED))


def test_single_questions_that_never_go_on_are_not_kept_after_a_while() -> None:
    newcomers = Newcomers()
    passing = [newcomers.began() for _ in range(1000)]
    assert passing.count(False) == MOST_UNCONTINUED
    assert all(passing[MOST_UNCONTINUED:])


def test_once_one_goes_on_they_are_kept_again() -> None:
    newcomers = Newcomers()
    for _ in range(1000):
        newcomers.began()
    newcomers.went_on()
    assert not newcomers.began()
