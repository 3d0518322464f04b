from __future__ import annotations

from kvproxy.upstream.breaker import (
    MAX_COOLDOWN_FACTOR,
    Breaker,
    BreakerState,
    Generation,
    Recovered,
    Tripped,
)


def entered(breaker: Breaker, now: float) -> Generation:
    generation = breaker.enter(now)
    assert generation is not None
    return generation


def fail(breaker: Breaker, now: float) -> Tripped | None:
    return breaker.record_failure(entered(breaker, now), now, "disk full")


def tripped(max_failures: int = 3, cooldown: float = 60.0) -> Breaker:
    """A breaker that opened at 0."""
    breaker = Breaker(max_failures, cooldown)
    for _ in range(max_failures):
        fail(breaker, 0.0)
    return breaker


def test_a_new_breaker_is_closed_and_lets_through() -> None:
    breaker = Breaker(3, 60.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert breaker.allows(0.0)
    assert breaker.seconds_left(0.0) == 0


def test_the_last_of_the_failures_in_a_row_trips_it_and_says_why() -> None:
    breaker = Breaker(3, 60.0)
    assert fail(breaker, 1.0) is None
    assert fail(breaker, 2.0) is None
    assert fail(breaker, 3.0) == Tripped(3, 60.0, "disk full")
    assert breaker.state(3.0) is BreakerState.OPEN
    assert breaker.seconds_left(13.0) == 50.0


def test_a_success_starts_the_count_anew() -> None:
    breaker = Breaker(2, 60.0)
    fail(breaker, 0.0)
    assert breaker.record_success(entered(breaker, 0.0), 0.0) is None
    assert fail(breaker, 0.0) is None
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_an_open_breaker_lets_nothing_through_until_its_cooldown_is_over() -> None:
    breaker = tripped()
    assert not breaker.allows(59.9)
    assert breaker.enter(59.9) is None
    assert breaker.allows(60.0)
    assert breaker.state(60.0) is BreakerState.HALF_OPEN


def test_half_open_lets_exactly_one_probe_through() -> None:
    breaker = tripped()
    assert breaker.enter(60.0) is not None
    assert breaker.enter(60.0) is None
    assert not breaker.allows(61.0)
    assert breaker.state(61.0) is BreakerState.HALF_OPEN


def test_asking_whether_it_allows_claims_nothing() -> None:
    breaker = tripped()
    assert breaker.allows(60.0)
    assert breaker.allows(60.0)
    assert breaker.enter(60.0) is not None


def test_a_probe_that_goes_well_closes_it() -> None:
    breaker = tripped()
    assert breaker.record_success(entered(breaker, 60.0), 61.0) == Recovered()
    assert breaker.state(61.0) is BreakerState.CLOSED
    assert fail(breaker, 62.0) is None


def test_a_probe_that_fails_opens_it_for_twice_as_long() -> None:
    breaker = tripped()
    assert fail(breaker, 60.0) == Tripped(4, 120.0, "disk full")
    assert not breaker.allows(179.0)
    assert breaker.allows(180.0)


def test_the_cooldown_grows_to_a_bound() -> None:
    breaker, now = tripped(), 0.0
    for _ in range(8):
        now += breaker.seconds_left(now)
        fail(breaker, now)
    assert breaker.seconds_left(now) == MAX_COOLDOWN_FACTOR * 60.0


def test_the_cooldown_is_short_again_after_a_recovery() -> None:
    breaker = tripped(max_failures=1)
    fail(breaker, 60.0)
    breaker.record_success(entered(breaker, 180.0), 180.0)
    assert fail(breaker, 181.0) == Tripped(1, 60.0, "disk full")


def test_a_result_from_before_the_trip_is_not_heard() -> None:
    breaker = Breaker(1, 60.0)
    early = entered(breaker, 0.0)
    fail(breaker, 1.0)
    assert breaker.record_success(early, 2.0) is None
    assert breaker.record_failure(early, 2.0, "late") is None
    assert breaker.state(2.0) is BreakerState.OPEN
    assert breaker.seconds_left(2.0) == 59.0


def test_a_result_from_before_the_trip_does_not_decide_for_the_probe() -> None:
    breaker = Breaker(1, 60.0)
    early = entered(breaker, 0.0)
    fail(breaker, 1.0)
    probe = entered(breaker, 61.0)
    assert breaker.record_success(early, 62.0) is None
    assert breaker.state(62.0) is BreakerState.HALF_OPEN
    assert breaker.record_success(probe, 62.0) == Recovered()


def test_a_probe_without_a_verdict_makes_room_for_the_next() -> None:
    breaker = tripped()
    probe = entered(breaker, 60.0)
    breaker.withdraw(probe)
    assert breaker.allows(61.0)
    assert breaker.enter(61.0) != probe


def test_a_withdrawn_attempt_changes_nothing_while_closed() -> None:
    breaker = Breaker(1, 60.0)
    breaker.withdraw(entered(breaker, 0.0))
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert breaker.generation == 0
    fail(breaker, 1.0)
    assert breaker.seconds_left(1.0) == 60.0


def test_withdrawing_an_attempt_from_before_the_trip_shortens_no_cooldown() -> None:
    breaker = Breaker(1, 60.0)
    early = entered(breaker, 0.0)
    fail(breaker, 1.0)
    breaker.withdraw(early)
    assert not breaker.allows(2.0)


def test_a_probe_that_is_never_heard_of_is_given_up_after_a_cooldown() -> None:
    breaker = tripped()
    lost = entered(breaker, 60.0)
    assert breaker.enter(119.0) is None
    again = entered(breaker, 120.0)
    assert breaker.record_success(lost, 121.0) is None
    assert breaker.record_success(again, 121.0) == Recovered()
