from __future__ import annotations

import pytest

from kvproxy.telemetry.bus import EventBus
from kvproxy.telemetry.events import Event, IdsDisagreed, Warned
from tests.support.fakes_core import MAIN

NEWS = Warned("news")


def test_every_listener_hears_every_event_in_the_order_they_came() -> None:
    heard: list[tuple[str, Event]] = []
    bus = EventBus()
    bus.subscribe(lambda event: heard.append(("first", event)))
    bus.subscribe(lambda event: heard.append(("second", event)))
    bus.emit(NEWS)
    assert heard == [("first", NEWS), ("second", NEWS)]


def test_a_listener_hears_the_kinds_it_asked_for_alone_also_those_that_went_by_before() -> None:
    heard: list[Event] = []
    bus = EventBus()
    bus.emit(NEWS)
    unsubscribe = bus.subscribe(heard.append, Warned, IdsDisagreed)
    bus.subscribe(heard.append, IdsDisagreed)
    bus.emit(NEWS)
    assert heard == [NEWS]
    unsubscribe()
    bus.emit(NEWS)
    bus.emit(IdsDisagreed(MAIN))
    assert heard == [NEWS, IdsDisagreed(MAIN)]


def test_a_listener_that_raises_hurts_neither_the_core_nor_the_others_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Event] = []

    def broken(event: Event) -> None:
        raise ZeroDivisionError

    bus = EventBus()
    bus.subscribe(broken)
    bus.subscribe(heard.append)
    bus.emit(NEWS)
    bus.emit(NEWS)
    assert heard == [NEWS, NEWS]
    (record,) = caplog.records
    assert "broken" in record.getMessage()
    assert record.exc_info is not None


def test_an_ended_subscription_hears_nothing_even_when_ended_twice() -> None:
    heard: list[Event] = []
    bus = EventBus()
    unsubscribe = bus.subscribe(heard.append)
    unsubscribe()
    unsubscribe()
    bus.emit(NEWS)
    assert heard == []


def test_a_listener_may_end_its_own_subscription_while_it_hears() -> None:
    heard: list[Event] = []
    bus = EventBus()

    def once(event: Event) -> None:
        heard.append(event)
        unsubscribe()

    unsubscribe = bus.subscribe(once)
    bus.subscribe(heard.append)
    bus.emit(NEWS)
    assert heard == [NEWS, NEWS]
