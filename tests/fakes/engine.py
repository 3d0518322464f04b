"""The server's task queue: who runs when, who waits, and what happens on the way.

One loop serves everything, as in the original: a slot action or a prompt batch holds all others up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.faults import Faults
from tests.fakes.runs import Run
from tests.fakes.state import AUTO, Slot, SlotBank
from tests.fakes.tokens import BYTE_OFFSET


@dataclass(frozen=True, slots=True)
class Started:
    """The slot starts on the prompt."""

    index: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    index: int
    total: int
    cache: int
    processed: int


@dataclass(frozen=True, slots=True)
class Token:
    index: int
    text: bytes
    n_decoded: int


@dataclass(frozen=True, slots=True)
class Final:
    index: int
    id_slot: int
    text: bytes
    n_prompt: int
    n_cached: int
    n_decoded: int
    stopped_by_limit: bool
    truncated: bool


@dataclass(frozen=True, slots=True)
class Broken:
    """The prompt could not be computed."""

    message: str


@dataclass(frozen=True, slots=True)
class TooLong:
    n_prompt: int
    n_ctx: int


Event = Started | PromptProgress | Token | Final | Broken | TooLong | dict[str, Any]


@dataclass(slots=True)
class Completion:
    prompt: list[int]
    pin: int = AUTO
    n_predict: int = AUTO
    cache_prompt: bool = True
    ignore_eos: bool = False
    generates: bool = True
    streams: bool = False
    """only then are there results before the final one"""
    index: int = 0
    siblings: int = 0
    """further answers to the same prompt (n > 1)"""
    tag: str = ""


@dataclass(slots=True)
class Action:
    id_slot: int
    act: Callable[[Slot], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class Task:
    id: int
    work: Completion | Action
    results: asyncio.Queue[Event]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    children: list[Task] = field(default_factory=list)

    @property
    def pin(self) -> int:
        """Slot actions wait without a slot of their own, so a pinned completion overtakes them."""
        return self.work.pin if isinstance(self.work, Completion) else AUTO


DEFAULT_PREDICT = 16
"""tokens before a request without a limit ends by itself"""


class Engine:
    def __init__(
        self, bank: SlotBank, faults: Faults, violations: list[str], runs: list[Run], life: int
    ) -> None:
        self.bank = bank
        self.faults = faults
        self.violations = violations
        self.runs = runs
        self.life = life
        self.max_concurrent_on_slot = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0
        self.predicted_tokens_total = 0
        self.last_result = 0.0
        self._ids = 0
        self._inbox: deque[Task] = deque()
        self.deferred: deque[Task] = deque()
        self._idle_loop = asyncio.Event()
        self._idle_loop.set()
        self._batches = 0
        self._jobs: set[asyncio.Task[None]] = set()

    def submit(self, work: Completion | Action, results: asyncio.Queue[Event]) -> Task:
        task = Task(self._next_id(), work, results)
        self._inbox.append(task)
        self._drain()
        return task

    def cancel(self, task: Task) -> None:
        """Waiting: forgotten at once. Running: the slot is freed at the next token or prompt batch."""
        task.cancelled.set()
        for child in task.children:
            child.cancelled.set()
        for queue in (self._inbox, self.deferred):
            if task in queue:
                queue.remove(task)

    async def settled(self) -> None:
        """Returns when no slot action holds up the loop."""
        await self._idle_loop.wait()

    def stop(self) -> None:
        for job in self._jobs:
            job.cancel()

    def emit_early(self, task: Task, work: Completion, event: Event) -> None:
        if work.streams:
            self.emit(task, event)

    def emit(self, task: Task, event: Event) -> None:
        self.last_result = asyncio.get_running_loop().time()
        task.results.put_nowait(event)

    def note_result(self) -> None:
        self.last_result = asyncio.get_running_loop().time()

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids - 1

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        running = asyncio.get_running_loop().create_task(job)
        self._jobs.add(running)
        running.add_done_callback(self._jobs.discard)

    def _drain(self) -> None:
        while self._inbox and self._idle_loop.is_set() and not self._batches:
            self._process(self._inbox.popleft())

    def _process(self, task: Task) -> None:
        if isinstance(task.work, Action):
            self._process_action(task, task.work)
        else:
            self._process_completion(task, task.work)

    def _process_action(self, task: Task, action: Action) -> None:
        slot = self.bank.by_id(action.id_slot)
        if slot.is_processing:
            self._defer(task, slot)
            return
        self._idle_loop.clear()
        self._spawn(self._run_action(task, action, slot))

    async def _run_action(self, task: Task, action: Action, slot: Slot) -> None:
        try:
            self.emit(task, await action.act(slot))
        finally:
            self._idle_loop.set()
        self._drain()

    def _process_completion(self, task: Task, work: Completion) -> None:
        slot = self.bank.choose(work.prompt, work.pin, self.faults.unpinned_slot)
        if slot is None:
            self.deferred.append(task)
            return
        if slot.is_processing:
            if self.faults.mix_on_busy:
                slot.hold(work.prompt)
            self._defer(task, slot)
            return
        others = self.bank.free_besides(slot)
        if len(others) < work.siblings:
            self.deferred.append(task)
            return
        slot.running = task.id
        for position, other in enumerate(others[: work.siblings], start=1):
            self._launch_child(task, work, other, work.index + position)
        self.bank.launched()
        self._count_on(slot)
        self._spawn(self._run(task, work, slot))

    def _launch_child(self, task: Task, work: Completion, slot: Slot, index: int) -> None:
        child = Task(self._next_id(), work, task.results)
        task.children.append(child)
        slot.running = child.id
        self._spawn(self._run(child, work, slot, child_index=index))

    def _defer(self, task: Task, slot: Slot) -> None:
        kind = "action" if isinstance(task.work, Action) else "pinned request"
        self.violations.append(f"{kind} {task.id} met slot {slot.id} busy with {slot.running}")
        self.deferred.append(task)
        self._count_on(slot)

    def _count_on(self, slot: Slot) -> None:
        aimed = (t.work.id_slot if isinstance(t.work, Action) else t.work.pin for t in self.deferred)
        waiting = sum(1 for pin in aimed if pin != AUTO and self.bank.by_id(pin) is slot)
        self.max_concurrent_on_slot = max(self.max_concurrent_on_slot, waiting + slot.is_processing)

    def _release(self, slot: Slot) -> None:
        """Each release lets exactly one waiting task go on, one pinned to this slot if there is one."""
        self.bank.finished(slot)
        mine = next((t for t in self.deferred if t.pin == slot.id), None)
        chosen = mine or next(iter(self.deferred), None)
        if chosen is not None:
            self.deferred.remove(chosen)
            self._inbox.appendleft(chosen)

    async def _run(self, task: Task, work: Completion, slot: Slot, child_index: int | None = None) -> None:
        index = work.index if child_index is None else child_index
        outcome: Event | None = None
        try:
            outcome = await self._answer(task, work, slot, index)
        finally:
            if child_index is not None:
                slot.hold([])
            if not isinstance(outcome, Broken):
                slot.draft_tokens = len(slot.tokens)
            self._release(slot)
            if outcome is not None:
                self.emit(task, outcome)
        self._drain()

    async def _answer(self, task: Task, work: Completion, slot: Slot, index: int) -> Event | None:
        """The whole life of a request on its slot; None if the client left."""
        if len(work.prompt) >= slot.n_ctx:
            return TooLong(len(work.prompt), slot.n_ctx)
        cached = self._begin(work, slot)
        self.emit_early(task, work, Started(index))
        if slot.is_draft_behind:
            return Broken("decode() failed: failed to process speculative batch")
        await self._prefill(task, work, slot, index)
        if work.generates and not (task.cancelled.is_set() or slot.was_cut_off):
            await self._pause(task, self.faults.slow_first_token)
            if self.faults.out_of_room:
                self.faults.out_of_room -= 1
                slot.hold([])
                return Broken("Context size has been exceeded.")
            text, by_limit, truncated = await self._generate(task, work, slot, index)
        else:
            text, by_limit, truncated = b"", False, False
        if task.cancelled.is_set():
            return None
        if slot.was_cut_off:
            return Broken("Context size has been exceeded.")
        decoded = slot.progress.n_decoded
        slot.has_next_token = False
        return Final(index, slot.id, text, len(work.prompt), cached, decoded, by_limit, truncated)

    def _begin(self, work: Completion, slot: Slot) -> int:
        """How many tokens of what the slot holds are reused."""
        held, was_restored = slot.tokens, slot.restored
        wasted = was_restored and self.faults.useless_restores
        cached = slot.begin(work.prompt, reuse=work.cache_prompt and work.generates and not wasted)
        self.cached_tokens_total += cached
        slot.run = Run(work.tag, self.life, slot.id, work.prompt, held, was_restored, cached)
        self.runs.append(slot.run)
        return cached

    async def _prefill(self, task: Task, work: Completion, slot: Slot, index: int) -> None:
        total, cached = len(work.prompt), slot.progress.n_cached
        self.emit_early(task, work, PromptProgress(index, total, cached, cached))
        done = cached
        while done < total and not task.cancelled.is_set():
            batch = work.prompt[done : done + self.faults.batch]
            await self._decode_batch(len(batch))
            if slot.was_cut_off or not self.bank.grow(slot, batch):
                return
            done += len(batch)
            slot.progress.n_processed = done - cached
            self.prompt_tokens_total += len(batch)
            if slot.run is not None:
                slot.run.computed += len(batch)
            self.emit_early(task, work, PromptProgress(index, total, cached, done))

    async def _decode_batch(self, size: int) -> None:
        await self._idle_loop.wait()
        if not self.faults.prefill_rate:
            return
        self._batches += 1
        try:
            await asyncio.sleep(size / self.faults.prefill_rate)
        finally:
            self._batches -= 1
        self._drain()

    async def _generate(
        self, task: Task, work: Completion, slot: Slot, index: int
    ) -> tuple[bytes, bool, bool]:
        """Text, whether a limit ended it, whether that was the context. The last token is never held."""
        text = bytearray()
        limit = max(work.n_predict, 1) if work.n_predict >= 0 else None
        while not task.cancelled.is_set():
            await self._pause(task, self.faults.token_delay)
            await self._idle_loop.wait()
            if task.cancelled.is_set() or slot.was_cut_off:
                break
            token = slot.next_token()
            slot.progress.n_decoded += 1
            self.predicted_tokens_total += 1
            decoded = slot.progress.n_decoded
            if limit is None and decoded > DEFAULT_PREDICT and not work.ignore_eos:
                return bytes(text), False, False
            piece = bytes([token - BYTE_OFFSET])
            text += piece
            self.emit_early(task, work, Token(index, piece, decoded))
            if decoded == limit:
                return bytes(text), True, False
            if len(slot.tokens) + 1 >= slot.n_ctx:
                return bytes(text), True, True
            if not self.bank.grow(slot, [token]):
                break
        return bytes(text), False, False

    async def _pause(self, task: Task, seconds: float) -> None:
        """Sleeps, or less if the task is cancelled meanwhile."""
        if not seconds:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(seconds):
                await task.cancelled.wait()
        except TimeoutError:
            return
