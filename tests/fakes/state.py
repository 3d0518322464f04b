"""What slots hold and which one a request gets: no I/O, no waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.fakes.runs import Run
from tests.fakes.tokens import BYTE_OFFSET, common_prefix, refrain

AUTO = -1
SIMILARITY = 0.10
"""an idle slot must share more than this part of the prompt to be taken for it"""
KEEP = 0.5
"""a slot that would lose more than this part of its content saves it to the prompt cache first"""
RAM_KEEP = 0.25


@dataclass(slots=True)
class Progress:
    """Counters of one request while it runs; what GET /slots shows of a slot at rest is zeroes."""

    n_cached: int = 0
    n_processed: int = 0
    n_decoded: int = 0


@dataclass(slots=True)
class Slot:
    id: int
    n_ctx: int
    tokens: list[int] = field(default_factory=list)
    running: int | None = None
    """id of the task that runs here"""
    last_task: int | None = None
    last_used: int = -1
    progress: Progress = field(default_factory=Progress)
    has_next_token: bool = True
    restored: bool = False
    words: bytes = b""
    draft: bool = False
    """a draft model runs ahead, whose memory no snapshot holds"""
    draft_tokens: int = 0
    """how far the draft's memory reaches"""
    was_cut_off: bool = False
    """the shared memory was full under its request"""
    run: Run | None = None
    """the newest that began here and has not ended"""

    @property
    def is_processing(self) -> bool:
        return self.running is not None

    def hold(self, tokens: Sequence[int], *, restored: bool = False) -> None:
        """The slot's content is now these tokens, and what it says follows from them."""
        self.tokens = list(tokens)
        self.restored = restored
        if not restored:
            self.draft_tokens = len(self.tokens)
        self.words = refrain(self.tokens)

    def begin(self, prompt: Sequence[int], *, reuse: bool) -> int:
        """Cuts the content to what the prompt can reuse; at least one token is always computed."""
        kept = common_prefix(self.tokens, prompt) if reuse else 0
        kept = min(kept, max(len(prompt) - 1, 0))
        self.tokens = self.tokens[:kept]
        self.restored = self.was_cut_off = False
        self.words = refrain(prompt)
        self.progress = Progress(n_cached=kept)
        return kept

    @property
    def is_draft_behind(self) -> bool:
        """The draft's memory ends before the text that is reused: there is a gap it cannot go on over. One
        that was emptied starts anew."""
        return self.draft and 0 < self.draft_tokens < self.progress.n_cached

    def next_token(self) -> int:
        return self.words[self.progress.n_decoded % len(self.words)] + BYTE_OFFSET


@dataclass(slots=True)
class PromptCache:
    """The server's own cache in memory (--cache-ram)."""

    entries: list[list[int]] = field(default_factory=list)

    def save(self, tokens: list[int]) -> None:
        if not tokens or any(common_prefix(entry, tokens) == len(tokens) for entry in self.entries):
            return
        self.entries = [e for e in self.entries if common_prefix(e, tokens) < len(e)]
        self.entries.append(list(tokens))

    def take_better(self, held: Sequence[int], prompt: Sequence[int]) -> list[int] | None:
        """Removes and returns the entry that serves the prompt better than what is held, if any."""
        shared = common_prefix(held, prompt)
        best_keep = shared / len(held) if held else -1.0
        best_shared, best = shared, None
        for entry in self.entries:
            overlap = common_prefix(entry, prompt)
            keep = overlap / len(entry)
            if keep >= RAM_KEEP and keep > best_keep and overlap > best_shared:
                best_keep, best_shared, best = keep, overlap, entry
        if best is not None:
            self.entries.remove(best)
        return best


class SlotBank:
    """All slots of one life of the server."""

    def __init__(
        self,
        count: int,
        n_ctx: int,
        *,
        ram_cache: bool = False,
        volatile: bool = False,
        draft: bool = False,
        cells: int | None = None,
    ) -> None:
        """`cells` is how many tokens all slots may hold together; None if each has a memory of its own."""
        self.slots = [Slot(i, n_ctx, draft=draft) for i in range(count)]
        self.cache = PromptCache() if ram_cache or volatile else None
        self.volatile = volatile
        self.cells = cells
        self._uses = 0

    def by_id(self, id_slot: int) -> Slot:
        """Ids wrap around, negative ones as unsigned 64-bit numbers do."""
        return self.slots[(id_slot % 2**64) % len(self.slots)]

    def choose(self, prompt: Sequence[int], pin: int, preferred: int | None = None) -> Slot | None:
        """The slot for a request, None when all are busy. A pinned one is returned even if it is busy."""
        if preferred is not None and pin == AUTO and not self.by_id(preferred).is_processing:
            return self.by_id(preferred)
        pinned = self.by_id(pin) if pin != AUTO else None
        similar, shared = self._most_similar(prompt, [pinned] if pinned else self.slots)
        chosen = similar or pinned
        if chosen is not None:
            if chosen.tokens and shared / len(chosen.tokens) < KEEP:
                self._refresh(chosen, prompt)
            return chosen
        chosen = self._least_recently_used()
        if chosen is not None:
            self._refresh(chosen, prompt)
        return chosen

    def _most_similar(self, prompt: Sequence[int], among: Sequence[Slot]) -> tuple[Slot | None, int]:
        best, best_shared = None, 0
        for slot in among:
            shared = 0 if slot.is_processing else common_prefix(slot.tokens, prompt)
            if shared > best_shared and shared > SIMILARITY * len(prompt):
                best, best_shared = slot, shared
        return best, best_shared

    def _least_recently_used(self) -> Slot | None:
        """Of equals the last one wins: a fresh server starts from its highest slot."""
        idle = [slot for slot in self.slots if not slot.is_processing]
        return min(idle, key=lambda slot: (slot.last_used, -slot.id), default=None)

    def _refresh(self, slot: Slot, prompt: Sequence[int]) -> None:
        """Swaps a slot's content with the prompt cache, as the original does: even under a running answer."""
        if self.cache is None:
            return
        self.cache.save(slot.tokens)
        better = self.cache.take_better(slot.tokens, prompt)
        if better is not None:
            slot.hold(better)

    def launched(self) -> None:
        """A task was launched: idle slots go to the prompt cache, and with unified memory are cleared."""
        if self.cache is None:
            return
        for slot in self.slots:
            if not slot.is_processing:
                self.cache.save(slot.tokens)
                if self.volatile:
                    slot.hold([])

    def has_room(self, slot: Slot, tokens: int) -> bool:
        """Whether `slot` could hold `tokens` beside what the others hold."""
        others = sum(len(other.tokens) for other in self.slots if other is not slot)
        return self.cells is None or others + tokens <= self.cells

    def grow(self, slot: Slot, tokens: Sequence[int]) -> bool:
        """Adds to what `slot` holds, once idle slots were emptied in order until there is room. Where that is
        not enough every running request is cut off, and its slot emptied: then False."""
        needed = len(slot.tokens) + len(tokens)
        for other in self.free_besides(slot):
            if not self.has_room(slot, needed):
                other.hold([])
        if self.has_room(slot, needed):
            slot.tokens.extend(tokens)
            return True
        for running in self.slots:
            if running.is_processing:
                running.hold([])
                running.was_cut_off = True
        return False

    def free_besides(self, chosen: Slot) -> list[Slot]:
        return [slot for slot in self.slots if slot is not chosen and not slot.is_processing]

    def finished(self, slot: Slot) -> None:
        if slot.run is not None:
            slot.run.left, slot.run = slot.tokens, None
        self._uses += 1
        slot.last_used = self._uses
        slot.last_task, slot.running = slot.running, None
        slot.progress = Progress()
