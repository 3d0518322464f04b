"""The proof: save, erase and restore an idle slot, and see whether the next request reuses it.

Twice, because models differ in what they can go on from. First the next prompt extends exactly what was
saved. Then the saved slot ends in tokens the model made, and the next prompt has others in their place, as
when a client sends the reply back in its own words: recurrent state cannot be turned back to before them.

A sliding window that kvproxy would open in its snapshots (see `slotfile.window`) is opened here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.snapshots.files import FileCheck, SnapshotFiles
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.names import new_name, new_owner
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import (
    ActionFailure,
    Completed,
    Fault,
    Restored,
    Saved,
    SlotInfo,
    Unavailable,
)

PROMPT_TOKENS = 600
TURN_TOKENS = 32
REPLY_TOKENS = 8
LEAST_CONTEXT = PROMPT_TOKENS + 2 * TURN_TOKENS + REPLY_TOKENS + 1

BEYOND_WINDOW_TOKENS = 88
"""A window can be opened once tokens have left it."""
LONGEST_WINDOW = 4096
"""To fill a longer one would take minutes on a slow machine."""

COMPLETION_SECONDS = 300.0
"""A prompt of 600 tokens at 2 tokens a second: slower than anyone would serve."""
ACTION_SECONDS = 60.0

_LEAST_LINES = 300
_LEAST_TOKENS_OF_A_LINE = 7
"""Tokenisers make up to 40 of one."""


@dataclass(frozen=True, slots=True)
class Survival:
    """One save, erase, restore and next request; None where it did not get that far.

    `shared_tokens` is what the next prompt has in common with what was saved.
    """

    shared_tokens: int
    saved: Saved | ActionFailure
    file: FileCheck | None = None
    restored: Restored | ActionFailure | None = None
    answer: Completed | Unavailable | None = None
    kind: MemoryKind = MemoryKind.UNKNOWN
    """The kind of memory that the file shows."""
    is_opened: bool = False
    """Whether a copy with an open window was restored in its place."""

    @property
    def came_through(self) -> bool:
        """Whether every step had an answer; what the answers say is another matter."""
        return isinstance(self.answer, Completed)

    @property
    def timed_out(self) -> bool:
        """An action may still run."""
        ends = (self.saved, self.restored)
        return any(isinstance(end, ActionFailure) and end.fault is Fault.TIMED_OUT for end in ends)


@dataclass(frozen=True, slots=True)
class Probed:
    """What the probe saw. `trouble` says why it could not even begin; `leftover` names a file that we
    cannot delete. `is_cleared`: a request in another slot emptied the probed one; None if not seen."""

    trouble: str = ""
    extended: Survival | None = None
    rewritten: Survival | None = None
    is_cleared: bool | None = None
    leftover: SnapshotName | None = None


def empty_slots(slots: Sequence[SlotInfo]) -> tuple[SlotId, ...]:
    """Idle slots that hold nothing of value."""
    return tuple(slot.id for slot in slots if not slot.is_processing and not slot.n_prompt_tokens)


def prompt_tokens(window: int | None) -> int:
    """How long the probe's prompt is for a `window` that is to be opened."""
    return PROMPT_TOKENS if window is None else max(PROMPT_TOKENS, window + BEYOND_WINDOW_TOKENS)


def window_to_probe(window: int | None, n_ctx: int | None) -> int | None:
    """The window to open in the probe; None where that would take too long a prompt."""
    if window is None or window > LONGEST_WINDOW:
        return None
    needed = LEAST_CONTEXT - PROMPT_TOKENS + prompt_tokens(window)
    return window if n_ctx is None or needed <= n_ctx else None


class Probe:
    """Uses `slot`, and `neighbour` if there is one; both must be idle and empty, and are empty after."""

    def __init__(
        self,
        client: LlamaServer,
        files: SnapshotFiles,
        slot: SlotId,
        neighbour: SlotId | None,
        window: int | None = None,
    ) -> None:
        self._client = client
        self._files = files
        self._slot = slot
        self._neighbour = neighbour
        self._owner = new_owner()
        self._name = new_name(self._owner)
        self._window = window
        self._prompt_tokens = prompt_tokens(window)
        self._copies: list[SnapshotName] = []
        self._has_file = False
        self._is_stuck = False

    async def run(self) -> Probed:
        # The name makes each probe's text its own: the server may remember an earlier one in memory, and
        # its reuse would look like a restore.
        needed = self._prompt_tokens + 2 * TURN_TOKENS
        tokens = await self._client.tokenize(_text(self._name, needed))
        if isinstance(tokens, Unavailable):
            return Probed(f"POST /tokenize: {tokens.message}")
        if len(tokens) < needed:
            return Probed(f"the probe's text has only {len(tokens)} tokens here")
        try:
            probed = await self._prove(tokens[:needed])
        finally:
            leftover = await self._tidy()
        return replace(probed, leftover=leftover)

    async def _prove(self, tokens: Sequence[int]) -> Probed:
        opening, turn = tokens[: self._prompt_tokens], tokens[: self._prompt_tokens + TURN_TOKENS]
        first = await self._complete(self._slot, opening)
        if isinstance(first, Unavailable):
            return Probed(f"POST /completion: {first.message}")
        extended = await self._survive(len(opening), turn, n_predict=REPLY_TOKENS)
        if not extended.came_through:
            return Probed(extended=extended)
        # The text's own beginning, which holds the random name: no model guesses that as its reply, and
        # a guess would make an exact continuation of what should be none.
        rewritten = await self._survive(len(turn), [*turn, *tokens[:TURN_TOKENS]])
        if not rewritten.came_through:
            return Probed(extended=extended, rewritten=rewritten)
        return Probed("", extended, rewritten, await self._disturb(tokens[-TURN_TOKENS:]))

    async def _survive(self, shared: int, following: Sequence[int], *, n_predict: int = 0) -> Survival:
        saved = await self._client.start_save(self._slot, self._name).wait(ACTION_SECONDS)
        survival = Survival(shared, saved)
        self._is_stuck = survival.timed_out
        if isinstance(saved, ActionFailure):
            return survival
        self._has_file = True
        file, kind = await self._files.verify_saved(self._name, saved), await self._files.kind_of(self._name)
        survival = replace(survival, file=file, kind=kind)
        if saved.tokens < 1:
            return survival
        name = await self._opened()
        restored = await self._erase_and_restore(name)
        survival = replace(survival, restored=restored, is_opened=name != self._name)
        self._is_stuck = survival.timed_out
        if isinstance(restored, ActionFailure):
            return survival
        answer = await self._complete(self._slot, following, n_predict=n_predict)
        return replace(survival, answer=answer)

    async def _opened(self) -> SnapshotName:
        """A copy with an open window; the file itself where there is no window to open."""
        copy = new_name(self._owner)
        if self._window is None or await self._files.open_window(self._name, copy, self._window) is not None:
            return self._name
        self._copies.append(copy)
        return copy

    async def _erase_and_restore(self, name: SnapshotName) -> Restored | ActionFailure:
        erased = await self._client.start_erase(self._slot).wait(ACTION_SECONDS)
        if isinstance(erased, ActionFailure):
            return replace(erased, message=f"erase: {erased.message}")
        return await self._client.start_restore(self._slot, name).wait(ACTION_SECONDS)

    async def _disturb(self, prompt: Sequence[int]) -> bool | None:
        """Whether a request in the neighbour empties the probed slot."""
        if self._neighbour is None:
            return None
        if isinstance(await self._complete(self._neighbour, prompt), Unavailable):
            return None
        slots = await self._client.slots()
        if isinstance(slots, Unavailable):
            return None
        held = next((slot.n_prompt_tokens for slot in slots if slot.id == self._slot), None)
        return None if held is None else held == 0

    async def _complete(
        self, slot: SlotId, prompt: Sequence[int], *, n_predict: int = 0
    ) -> Completed | Unavailable:
        return await self._client.complete(slot, prompt, n_predict=n_predict, timeout=COMPLETION_SECONDS)

    async def _tidy(self) -> SnapshotName | None:
        """Leave slots and directory as they were; the name of what must stay."""
        if self._is_stuck:  # one action at a time: the next could wait for ever behind it
            return self._name
        for copy in self._copies:
            await self._files.delete(copy)
        for slot in (self._slot, self._neighbour):
            if slot is not None:
                await self._client.start_erase(slot).wait(ACTION_SECONDS)
        if not self._has_file or await self._deleted():
            return None
        # Saving the emptied slot under the same name leaves a few bytes where megabytes were.
        await self._client.start_save(self._slot, self._name).wait(ACTION_SECONDS)
        return self._name

    async def _deleted(self) -> bool:
        is_seen = self._name in await self._files.orphans((), self._owner)
        return is_seen and await self._files.delete(self._name)


def _text(salt: str, tokens: int) -> str:
    count = max(_LEAST_LINES, tokens // _LEAST_TOKENS_OF_A_LINE + 1)
    lines = (f"Line {number}: {number * 37 % 101} sheep went by." for number in range(count))
    return "\n".join((salt, *lines))
