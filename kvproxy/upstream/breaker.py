"""The circuit breaker for persistence: after a run of failures, nothing is saved or restored for a while.

    closed ──max_failures in a row──> open ──cooldown over, enter()──> half_open ──success──> closed
                                        ^──────────────failure─────────────┘ (cooldown doubles)

Each change of state starts a generation. An attempt carries the generation in which it entered, and its
result counts only while that one lasts: a save that began before the trip says nothing about the probe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

Generation = NewType("Generation", int)

MAX_COOLDOWN_FACTOR = 10


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class Tripped:
    """The breaker opened for `cooldown_seconds`; `failures` in a row since the last success."""

    failures: int
    cooldown_seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """The breaker closed after a probe that went well."""


class Breaker:
    """`now` is always seconds of one monotonic clock."""

    __slots__ = ("_base", "_failures", "_generation", "_max_failures", "_opened_for", "_since", "_state")

    def __init__(self, max_failures: int, cooldown_seconds: float) -> None:
        self._max_failures = max_failures
        self._base = cooldown_seconds
        self._state = BreakerState.CLOSED
        self._generation = Generation(0)
        self._failures = 0
        self._opened_for = cooldown_seconds
        self._since = 0.0

    @property
    def generation(self) -> Generation:
        return self._generation

    def state(self, now: float) -> BreakerState:
        """As it is at `now`: an open breaker whose cooldown is over reads as half open."""
        if self._state is BreakerState.OPEN and self.seconds_left(now) == 0:
            return BreakerState.HALF_OPEN
        return self._state

    def seconds_left(self, now: float) -> float:
        """Until the next attempt is let through; 0 when one would be, or when the breaker is closed."""
        if self._state is BreakerState.CLOSED:
            return 0.0
        return max(0.0, self._since + self._opened_for - now)

    def allows(self, now: float) -> bool:
        """Whether `enter` would let an attempt through; claims nothing."""
        return self.seconds_left(now) == 0

    def enter(self, now: float) -> Generation | None:
        """Begin an attempt; None when it must not be made. Half open, this claims the one probe.

        A probe without a verdict for a whole cooldown is given up, and the next one let through.
        """
        if not self.allows(now):
            return None
        if self._state is not BreakerState.CLOSED:
            self._move(BreakerState.HALF_OPEN, now)
        return self._generation

    def withdraw(self, generation: Generation) -> None:
        """The attempt ended without a verdict: the place of the probe is free again."""
        if generation == self._generation:
            self._since = -math.inf

    def record_success(self, generation: Generation, now: float) -> Recovered | None:
        if generation != self._generation:
            return None
        self._failures = 0
        if self._state is BreakerState.CLOSED:
            return None
        self._opened_for = self._base
        self._move(BreakerState.CLOSED, now)
        return Recovered()

    def record_failure(self, generation: Generation, now: float, reason: str) -> Tripped | None:
        if generation != self._generation:
            return None
        self._failures += 1
        if self._state is BreakerState.CLOSED and self._failures < self._max_failures:
            return None
        if self._state is BreakerState.HALF_OPEN:
            self._opened_for = min(2 * self._opened_for, MAX_COOLDOWN_FACTOR * self._base)
        self._move(BreakerState.OPEN, now)
        return Tripped(self._failures, self._opened_for, reason)

    def _move(self, state: BreakerState, now: float) -> None:
        self._state = state
        self._since = now
        self._generation = Generation(self._generation + 1)
