"""What the slot table keeps of one slot."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvproxy.identifiers import SlotId
from kvproxy.slots.settling import Settling
from kvproxy.slots.slot import Occupancy, Sight, SlotView
from kvproxy.slots.state import SlotState

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
        )

    @property
    def _is_underway(self) -> bool:
        if self.settling is not None:
            return self.settling.was_seen
        return self.state is SlotState.SERVING and self.was_seen_running
