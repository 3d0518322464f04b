"""Carries events from the core to whoever listens."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvproxy.telemetry.events import Event

Listener = Callable[[Event], None]

_logger = logging.getLogger(__name__)


class EventBus:
    """`emit` calls the listeners at once, in the order they came, and never raises.

    A listener that raises is reported the first time and goes on being called: a broken metric must cost
    neither a request nor a full log.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._reported: set[Listener] = set()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Returns what ends the subscription; calling that twice is harmless."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
                self._reported.discard(listener)

        return unsubscribe

    def emit(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as error:
                self._report(listener, event, error)

    def _report(self, listener: Listener, event: Event, error: Exception) -> None:
        if listener not in self._reported:
            self._reported.add(listener)
            _logger.error("%r failed on %s; told once", listener, type(event).__name__, exc_info=error)
