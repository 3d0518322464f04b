"""Slot actions, one at a time per server.

llama-server pops one deferred action per slot release, so a second one in flight can wait for ever; and an
action that went past its deadline may still run later. Therefore one lock per server, kept by an action
until its *fate* is known, however long after its deadline that is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvproxy.clock import Clock
from kvproxy.identifiers import Epoch, ServerName
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Emit, PersistenceRecovered, PersistenceTripped
from kvproxy.upstream.breaker import Breaker, BreakerState, Generation, Recovered, Tripped
from kvproxy.upstream.client import Action
from kvproxy.upstream.rate import MARGIN, Rate
from kvproxy.upstream.replies import ActionFailure, Erased, Fault, Restored, Saved

T = TypeVar("T", Saved, Restored, Erased)

BATCH_ALLOWANCE_SECONDS = 15.0
"""How long an action may wait for another slot's prompt batch: 8 to 15 s were seen on a CPU."""

ERASE_SECONDS = 5.0
"""It moves no bytes."""

START_BYTES_PER_TOKEN = 65536.0
"""Before anything was saved: between a small model (23 KB) and a large one (256 KB)."""


class NotStarted(StrEnum):
    """Why no call was made."""

    BUSY = "busy"
    """Another action was in flight until the deadline."""
    BREAKER_OPEN = "breaker_open"
    SUPERSEDED = "superseded"
    """The server is another one by now, and its slots are not the ones meant."""


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """What an action gave, to be judged once its result was verified."""

    result: T | ActionFailure | NotStarted
    era: Generation | None = None

    @property
    def succeeded(self) -> bool:
        return not isinstance(self.result, ActionFailure | NotStarted)

    @property
    def failed_for_good(self) -> bool:
        """The call was made, and is over without success."""
        return isinstance(self.result, ActionFailure) and not self.timed_out

    @property
    def timed_out(self) -> bool:
        """The call was made and may still run."""
        return isinstance(self.result, ActionFailure) and self.result.fault is Fault.TIMED_OUT


class SlotActions:
    """The slot actions of one server, under its breaker."""

    def __init__(
        self,
        server: ServerName,
        breaker: Breaker,
        *,
        epoch: Callable[[], Epoch],
        clock: Clock,
        emit: Emit,
        tasks: TaskSet,
    ) -> None:
        self._server = server
        self._epoch = epoch
        self._breaker = breaker
        self._clock = clock
        self._emit = emit
        self._tasks = tasks
        self._turn = asyncio.Lock()
        self._bytes_per_token = START_BYTES_PER_TOKEN
        self.save_rate = Rate()
        self.restore_rate = Rate()

    async def run(
        self,
        start: Callable[[], Action[T]],
        epoch: Epoch,
        deadline_seconds: float,
        on_late: Callable[[T | ActionFailure], None],
    ) -> Attempt[T]:
        """Make one action on a slot of `epoch`, within the deadline, or a third more if its turn was late.

        `on_late` hears how one that timed out ended after all.
        """
        until = self._clock.now() + deadline_seconds
        if not await self._take_turn(deadline_seconds):
            return Attempt(NotStarted.BUSY)
        if epoch != self._epoch():
            self._turn.release()
            return Attempt(NotStarted.SUPERSEDED)
        era = self._breaker.enter(self._clock.now())
        if era is None:
            self._turn.release()
            return Attempt(NotStarted.BREAKER_OPEN)
        # Late as its turn has come, it is not given less than it is thought to take.
        seconds = max(0.05, until - self._clock.now(), deadline_seconds / MARGIN)
        return Attempt(await self._await(start(), seconds, on_late), era)

    def judge(self, attempt: Attempt[T], *, well: bool | None, reason: str = "") -> None:
        """Tell the breaker how the attempt went; None where it says nothing about persistence."""
        if attempt.era is None:
            return
        now = self._clock.now()
        if well is None:
            self._breaker.withdraw(attempt.era)
            return
        change: Tripped | Recovered | None = (
            self._breaker.record_success(attempt.era, now)
            if well
            else self._breaker.record_failure(attempt.era, now, reason)
        )
        if isinstance(change, Tripped):
            self._emit(
                PersistenceTripped(self._server, change.failures, change.cooldown_seconds, change.reason)
            )
        elif isinstance(change, Recovered):
            self._emit(PersistenceRecovered(self._server))

    def learn(self, tokens: int, size_bytes: int) -> None:
        """What a token costs on disk."""
        if tokens > 0:
            self._bytes_per_token = size_bytes / tokens

    def deadline(
        self, rate: Rate, floor_seconds: float, *, tokens: int | None, size_bytes: int = 0, others_run: bool
    ) -> float:
        """Seconds to grant an action that moves `size_bytes`, or what `tokens` are thought to weigh."""
        size = size_bytes or int((tokens or 0) * self._bytes_per_token)
        return rate.deadline(size, floor_seconds, BATCH_ALLOWANCE_SECONDS if others_run else 0.0)

    def save_seconds(self, tokens: int | None) -> float:
        """How long a save of `tokens` is thought to take; None counts as none."""
        return (tokens or 0) * self._bytes_per_token / self.save_rate.bytes_per_second

    @property
    def are_allowed(self) -> bool:
        """Whether the breaker would let an action through now."""
        return self._breaker.allows(self._clock.now())

    @property
    def breaker_state(self) -> BreakerState:
        return self._breaker.state(self._clock.now())

    @property
    def bytes_per_token(self) -> float:
        return self._bytes_per_token

    async def _take_turn(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._turn.acquire()
        except TimeoutError:
            return False
        return True

    async def _await(
        self, action: Action[T], timeout: float, on_late: Callable[[T | ActionFailure], None]
    ) -> T | ActionFailure:
        try:
            result = await action.wait(timeout)
        except asyncio.CancelledError:
            # The call goes on without the one who asked for it.
            self._keep_turn(action, on_late)
            raise
        except Exception:  # a bug, which goes on up: the call is over
            self._turn.release()
            raise
        if action.done:
            self._turn.release()
        else:
            self._keep_turn(action, on_late)
        return result

    def _keep_turn(self, action: Action[T], on_late: Callable[[T | ActionFailure], None]) -> None:
        self._tasks.spawn(self._see_out(action, on_late), name="late slot action")

    async def _see_out(self, action: Action[T], on_late: Callable[[T | ActionFailure], None]) -> None:
        try:
            fate = await action.fate()
        finally:
            self._turn.release()
        on_late(fate)
