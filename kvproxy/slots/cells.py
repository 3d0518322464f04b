"""Whether what is to run fits in a memory that all slots share: pure.

With unified KV the slots of a server have one pool of cells, a token in each. When it is full the server
first empties idle slots, in no particular order, and then ends every running request with an error and
empties its slot. So a request is granted its slot only if all that run may grow to their ends beside each
other, and before it is sent, idle slots are emptied whose room it may come to need: those that are missed
least, saved first.

What a slot holds is known from answers, and counted too high rather than too low where it is not. A request
that runs alone is never held back: whether it fits is between its client and the server.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvproxy.identifiers import SlotId
from kvproxy.slots.slot import SlotView
from kvproxy.slots.state import SlotState

_AT_WORK = (SlotState.SERVING, SlotState.CANCELLING, SlotState.RESTORING, SlotState.SAVING)


def may_run(pool: int, need: int, slots: Collection[SlotId], views: Sequence[SlotView]) -> bool:
    """Whether a request may be given `slots`, in one of which it may come to need `need` cells of `pool`.

    Idle slots do not stand in its way, since they can be emptied.
    """
    others = [view for view in views if view.id not in slots and not view.is_free]
    if not any(_is_at_work(view) for view in others):
        return True
    return need + sum(view.cells for view in others) <= pool


def has_room(pool: int, need: int, slot: SlotId, views: Sequence[SlotView]) -> bool:
    """Whether `slot` may come to need `need` cells beside all that the others hold as they are."""
    return need + sum(view.cells for view in views if view.id != slot) <= pool


def next_to_empty(
    pool: int, need: int, slot: SlotId, views: Sequence[SlotView], tried: Collection[SlotId] = ()
) -> SlotId | None:
    """The idle slot to empty next, so that `slot` may come to need `need` cells; None if there is room, or
    nothing is left to empty. `tried` are slots that could not be emptied."""
    if has_room(pool, need, slot, views):
        return None
    idle = [v for v in views if v.id != slot and v.id not in tried and v.is_free and v.cells]
    return min(idle, key=_worth).id if idle else None


def _is_at_work(view: SlotView) -> bool:
    return view.is_leased or view.state in _AT_WORK


def _worth(view: SlotView) -> tuple[int, float]:
    """What is lost with a slot's content, least first: nobody's, saved, not saved; then by last use."""
    if view.occupancy is None:
        return (0, view.last_used)
    return (2 if view.is_dirty else 1, view.last_used)
