"""What the slot table keeps of one slot."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvproxy.identifiers import SlotId
from kvproxy.slots.settling import Settling
from kvproxy.slots.slot import Occupancy, Sight, SlotView
from kvproxy.slots.state import SlotEvent, SlotState, advance
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

    def move(self, event: SlotEvent, now: float) -> None:
        """The only way its state changes. `now` is monotonic seconds."""
        self.state = advance(self.state, event)
        if event is SlotEvent.SAVE:
            self.occupancy = self.occupancy and self.occupancy.begin_checkpoint()
        else:  # also after a save: before some of them the slot is rewound
            self.sight, self.changed_at = None, now
        if self.state is SlotState.IDLE:
            self.was_swept = False

    def grow(self) -> None:
        """Its request goes on, or may: it may come to hold all that was claimed."""
        self.cells = max(self.cells, self.claim)

    def end(self, occupancy: Occupancy | None, now: float) -> None:
        """Its request is over and left `occupancy`; None where that is nobody's."""
        self.last_used, self.settling = now, None
        if self.pending_actions:
            # A late restore or save may have met this request: nothing here may be saved as a session's.
            self.occupancy = None
            self.move(SlotEvent.DOUBTED, now)
        else:
            self.occupancy = None if self.met_doubt else occupancy
            self.move(SlotEvent.KEPT if self.occupancy else SlotEvent.LOST, now)

    def was_used(self, info: SlotInfo, asked_at: float) -> bool:
        """Whether a look that began at `asked_at` shows that somebody else ran a task here."""
        is_free = self.holder is None and self.free_since < asked_at
        if not is_free or self.state not in (SlotState.IDLE, SlotState.RESIDENT):
            return False
        before, self.last_task = self.last_task, SeenTask(info.id_task)
        return info.is_processing or before not in (None, self.last_task)

    def weigh(self, info: SlotInfo) -> None:
        """It was seen at rest, as it is now."""
        if info.n_prompt_tokens is not None:
            self.cells = info.n_prompt_tokens

    def view(self) -> SlotView:
        leased = self.holder is not None
        return SlotView(
            self.id,
            self.state,
            self.occupancy,
            leased,
            self.last_used,
            self.is_blank,
            self._is_underway,
            self.sight,
            max(self.cells, self.claim),
        )

    @property
    def _is_underway(self) -> bool:
        if self.settling is not None:
            return self.settling.was_seen
        return self.state is SlotState.SERVING and self.was_seen_running
