"""What a request asks of the lease desk, and the slots it would be given now: pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum

from kvproxy.frozen import frozen
from kvproxy.identifiers import SessionKey, SlotId
from kvproxy.slots.placement import place
from kvproxy.slots.slot import SlotView


class Purpose(StrEnum):
    PINNED = "pinned"
    FLOATING = "floating"
    EXCLUSIVE = "exclusive"
    CHECKPOINT = "checkpoint"


@frozen
class Want:
    """What a request asks of the desk. `session` is None for one that owns nothing."""

    purpose: Purpose
    session: SessionKey | None = None
    cells: int = 0
    """Tokens that its slot is thought to hold in the end; told only where slots share one memory."""
    worst: int = 0
    """How many at most: all there are, where nothing limits the answer."""


def choose(
    want: Want, views: Sequence[SlotView], arriving: Collection[SessionKey] = (), apart: int = 0
) -> tuple[tuple[SlotId, ...], bool] | None:
    """The slots for `want`, and whether it is a fork; None to wait.

    `arriving` are the sessions for which a slot is being prepared that is not theirs yet: placed by what the
    slots show, another request of one would make it live in two. `apart` as for `place`.
    """
    if want.purpose is Purpose.PINNED:
        if want.session in arriving:
            return None
        placement = place(want.session, views, apart)
        return None if placement is None else ((placement.slot,), placement.is_fork)
    free = tuple(view.id for view in views if view.is_free)
    is_floating = want.purpose is Purpose.FLOATING
    enough = bool(free) and not any_in_hand(views) if is_floating else _all_free(views)
    return (free, False) if enough else None


def any_in_hand(views: Sequence[SlotView]) -> bool:
    return any(view.is_in_hand for view in views)


def _all_free(views: Sequence[SlotView]) -> bool:
    # A quarantined slot is not free: it may be in no condition for a request that touches all.
    return bool(views) and all(view.is_free for view in views)


def unused(views: Sequence[SlotView]) -> SlotId | None:
    """A slot that nobody lives in, a blank one if there is one, while no slot is in use. The last of them:
    the first are the likeliest to be wanted."""
    if not all(view.is_free for view in views):
        return None
    nobodys = [view for view in views if view.occupancy is None]
    return max(nobodys, key=lambda view: (view.is_blank, view.id)).id if nobodys else None
