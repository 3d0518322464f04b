"""Carries events from the core to whoever listens."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvproxy.telemetry.events import Event

Listener = Callable[[Event], None]

_logger = logging.getLogger(__name__)


class EventBus:
    """`emit` calls the listeners of an event's kind at once, in the order they came, and never raises.

    A listener that raises is reported the first time and goes on being called: a broken metric must cost
    neither a request nor a full log.
    """

    def __init__(self) -> None:
        self._subscriptions: list[tuple[Listener, tuple[type, ...]]] = []
        self._listeners: dict[type, tuple[Listener, ...]] = {}
        """By kind of event, found out when the first of a kind goes by."""
        self._reported: set[Listener] = set()

    def subscribe(self, listener: Listener, *kinds: type) -> Callable[[], None]:
        """`kinds` are those that `listener` hears of, none given for all. Returns what ends the subscription;
        calling that twice is harmless."""
        subscription = (listener, kinds)
        self._subscriptions.append(subscription)
        self._listeners.clear()

        def unsubscribe() -> None:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
                self._listeners.clear()
                self._reported.discard(listener)

        return unsubscribe

    def emit(self, event: Event) -> None:
        kind = type(event)
        if kind not in self._listeners:
            self._listeners[kind] = self._who_hears(kind)
        for listener in self._listeners[kind]:
            try:
                listener(event)
            except Exception as error:
                self._report(listener, event, error)

    def _who_hears(self, kind: type) -> tuple[Listener, ...]:
        return tuple(listener for listener, kinds in self._subscriptions if not kinds or kind in kinds)

    def _report(self, listener: Listener, event: Event, error: Exception) -> None:
        if listener not in self._reported:
            self._reported.add(listener)
            _logger.error("%r failed on %s; told once", listener, type(event).__name__, exc_info=error)
