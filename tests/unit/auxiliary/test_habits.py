from __future__ import annotations

from kvproxy.auxiliary.habits import Habits
from kvproxy.auxiliary.structure import UNKNOWN, Habit
from kvproxy.dialects.reading import read
from kvproxy.sessions.key import ClientId

ONE, TWO, THREE = (ClientId("x-session-id", name) for name in ("one", "two", "three"))
PLAIN = read("chat/completions", {"messages": []})
ARMED = read("chat/completions", {"messages": [], "tools": [{}]})


def test_what_a_turn_was_like_once_it_may_be_again() -> None:
    habits = Habits()
    for turn in (PLAIN, ARMED, PLAIN):
        habits.turn(ONE, turn)
    assert habits.of(ONE) == Habit(has_tools=True)
    assert habits.of(TWO) == UNKNOWN


def test_requests_without_an_id_or_that_cannot_be_read_have_no_habits() -> None:
    habits = Habits()
    habits.turn(None, ARMED)
    habits.turn(ONE, None)
    assert (len(habits), habits.of(None)) == (0, UNKNOWN)


def test_those_seen_least_recently_are_forgotten_first() -> None:
    habits = Habits(max_habits=2)
    for client in (ONE, TWO, ONE, THREE):
        habits.turn(client, ARMED)
    assert [habits.of(client).has_tools for client in (ONE, TWO, THREE)] == [True, False, True]
