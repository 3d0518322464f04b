"""What the slot table keeps of one slot."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvproxy.identifiers import SlotId
from kvproxy.slots.settling import Settling
from kvproxy.slots.slot import Occupancy, Sight, SlotView
from kvproxy.slots.state import AT_REST, SlotEvent, SlotState, advance
from kvproxy.upstream.replies import SlotInfo

MAY_BE_IDLE = (SlotState.RESIDENT, SlotState.RESTORING, SlotState.SAVING, SlotState.CANCELLING)
"""For all we know, the server runs nothing there."""


@dataclass(frozen=True, slots=True)
class SeenTask:
    """`id` is None for a slot that never ran a task."""

    id: int | None


@dataclass(slots=True)
class SlotRecord:
    id: SlotId
    last_used: float
    state: SlotState = SlotState.UNKNOWN
    occupancy: Occupancy | None = None
    holder: int | None = None
    """The id of the lease that is out on it."""
    is_blank: bool = False
    pending_actions: int = 0
    """Slot actions past their deadline whose fate is open."""
    met_doubt: bool = False
    """Its request was sent while an action's fate was open: which of the two came last, nobody can say."""
    settling: Settling | None = None
    was_seen_running: bool = False
    """The request it serves."""
    since: float = -math.inf
    """When that request was sent, or dropped."""
    sight: Sight | None = None
    """What was seen of its content as it is now."""
    changed_at: float = -math.inf
    """When what it holds may last have changed."""
    free_since: float = -math.inf
    """When the last lease on it was given back."""
    last_task: SeenTask | None = None
    """What it was seen to have run last, since then."""
    was_swept: bool = False
    """Another request was launched while this slot was in somebody's hands: what it held may be gone, and
    nothing but a save can tell."""
    cells: int = 0
    """Tokens that it holds at most."""
    claim: int = 0
    """Tokens that what its lease is for may come to need."""
    worst: int = 0
    """What that becomes if the answer goes on as long as it can."""
    is_sure: bool = True
    """What it holds was not emptied to make room for others."""

    def move(self, event: SlotEvent, now: float) -> None:
        """The only way its state changes. `now` is monotonic seconds."""
        self.state = advance(self.state, event)
        if event is SlotEvent.SAVE:
            self.occupancy = self.occupancy and self.occupancy.begin_checkpoint()
        else:  # also after a save: before some of them the slot is rewound
            self.sight, self.changed_at = None, now
        if self.state is SlotState.IDLE:
            self.was_swept = False

    def is_at_risk(self, slots: Iterable[SlotRecord], pool: int) -> bool:
        """Whether the server may run out of the room that all `slots` share; then it empties idle ones."""
        others = (max(one.cells, one.claim, one.worst) for one in slots if one is not self)
        return self.cells + sum(others) > pool

    def empty(self, *, is_blank: bool) -> None:
        """Nobody lives here any more; if it is known to be blank, nothing is left either."""
        self.occupancy, self.is_blank = None, is_blank
        self.cells = 0 if is_blank else self.cells

    def was_purged(self, info: SlotInfo) -> bool:
        """Whether the server has emptied it though somebody lives here, as `info` shows it now."""
        return self.occupancy is not None and bool(self.occupancy.tokens) and info.n_prompt_tokens == 0

    def grow(self) -> None:
        """Its request goes on, or may: it may come to hold all that was claimed."""
        if self.claim > self.cells:
            self.cells = self.claim

    def release(self, now: float) -> None:
        """Nobody holds it any more. A request that was dropped may go on."""
        if self.state is SlotState.CANCELLING:
            self.grow()
        else:
            self.worst = 0
        self.holder, self.claim = None, 0
        self.free_since, self.last_task = now, None

    def begin(self, occupancy: Occupancy | None, now: float) -> None:
        """A request is sent to it; `occupancy` is whose it will be (None: nobody's)."""
        self.move(SlotEvent.SERVE, now)
        self.occupancy, self.is_blank = occupancy, False
        self.grow()
        self.met_doubt = self.pending_actions > 0
        self.was_seen_running, self.was_swept, self.since = False, False, now

    def count(self, tokens: int | None) -> None:
        """It holds so many tokens; None where nobody told."""
        self.cells = self.cells if tokens is None else tokens

    def end(self, occupancy: Occupancy | None, tokens: int | None, now: float) -> None:
        """Its request is over and left `occupancy`; None where that is nobody's. `tokens` as for `served` of
        the table."""
        self.count(occupancy.tokens if tokens is None and occupancy else tokens)
        self.last_used, self.settling, self.worst = now, None, 0
        if self.pending_actions:
            # A late restore or save may have met this request: nothing here may be saved as a session's.
            self.occupancy = None
            self.move(SlotEvent.DOUBTED, now)
        else:
            self.occupancy = None if self.met_doubt else occupancy
            self.move(SlotEvent.KEPT if self.occupancy else SlotEvent.LOST, now)

    def end_action(self, now: float) -> None:
        """One of those whose fate was open has ended, however."""
        self.pending_actions -= 1
        if self.state is SlotState.QUARANTINED and not self.pending_actions:
            self.move(SlotEvent.FATE_KNOWN, now)

    def was_used(self, info: SlotInfo, asked_at: float) -> bool:
        """Whether a look that began at `asked_at` shows that somebody else ran a task here."""
        is_free = self.holder is None and self.free_since < asked_at
        if not is_free or self.state not in AT_REST:
            return False
        before, self.last_task = self.last_task, SeenTask(info.id_task)
        return info.is_processing or before not in (None, self.last_task)

    def drop(self, info: SlotInfo, now: float) -> None:
        """Somebody else ran a task here, or still does: what lived here is lost."""
        if self.state is SlotState.RESIDENT:
            self.move(SlotEvent.LOST, now)
        self.empty(is_blank=False)
        if info.is_processing:
            self.move(SlotEvent.SERVE, now)
            self.move(SlotEvent.BROKEN_OFF, now)
            self.settling, self.since = Settling(self.id, was_seen=True), now
        self.weigh(info)

    def weigh(self, info: SlotInfo) -> None:
        """It was seen at rest, as it is now."""
        self.sight = Sight(info.id_task, info.n_prompt_tokens)
        self.count(info.n_prompt_tokens)

    def view(self) -> SlotView:
        """Calls nothing: each request has several of them made."""
        if self.settling is not None:
            is_underway = self.settling.was_seen
        else:
            is_underway = self.state is SlotState.SERVING and self.was_seen_running
        return SlotView(
            self.id,
            self.state,
            self.occupancy,
            self.holder is not None,
            self.last_used,
            self.is_blank,
            is_underway,
            self.sight,
            self.cells if self.cells > self.claim else self.claim,
            self.is_sure,
        )

    def __str__(self) -> str:
        return f"{self.id}:{self.state}{'*' if self.holder is not None else ''}"
