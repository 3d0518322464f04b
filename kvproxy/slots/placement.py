"""Which slot a request gets: a pure choice, made at grant time.

For a request of a session:
 (1) the session's own slot, if it is free;
 (2) if its own slot is being saved, cancelled or restored: wait for exactly that slot, since elsewhere
     the request would compute what is about to be ready (for an eviction in flight: about to be stored);
 (3) if its own slot serves another request of the same session: elsewhere, as a fork that owns nothing.
For a request that has no slot yet, or must go elsewhere:
 (4) a slot nobody lives in, blank ones first; a request of nobody leaves those to the conversations, and
     takes first what another of its kind left behind;
 (5) the clean occupant that was used least recently;
 (6) the dirty occupant that was used least recently (the caller saves it first);
 (7) a quarantined slot: its late action must not hold a conversation when no other slot is left.
Slots can be set apart for requests of nobody, which take those first; no conversation gets one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.frozen import frozen
from kvproxy.identifiers import SessionKey, SlotId
from kvproxy.slots.slot import SlotView
from kvproxy.slots.state import SlotState


@frozen
class Placement:
    """`is_fork`: the session's own slot serves another of its requests; this one owns nothing."""

    slot: SlotId
    is_fork: bool = False


def place(session: SessionKey | None, views: Sequence[SlotView], apart: int = 0) -> Placement | None:
    """The slot for a request of `session` (None: of nobody), or None to wait. The last `apart` slots are set
    apart, but never all."""
    shared = views[: max(1, len(views) - apart)] if apart else views
    if session is None:
        return _for_nobody(views[len(shared) :]) or _for_nobody(shared)
    own = _own_slot(session, views)
    if own is None:
        return _elsewhere(shared, is_fork=False)
    if own.is_free:
        return Placement(own.id)
    if own.state is SlotState.SERVING:
        return _elsewhere(shared, is_fork=True)
    return None


def _for_nobody(views: Sequence[SlotView]) -> Placement | None:
    leftover = [view for view in views if view.is_free and view.occupancy is None and not view.is_blank]
    newest = max(leftover, key=lambda view: view.last_used, default=None)
    return _elsewhere(views, is_fork=False) if newest is None else Placement(newest.id)


def _own_slot(session: SessionKey, views: Sequence[SlotView]) -> SlotView | None:
    for view in views:
        if view.occupancy is not None and view.occupancy.session == session:
            return view
    return None


def _elsewhere(views: Sequence[SlotView], *, is_fork: bool) -> Placement | None:
    free = [view for view in views if view.is_free]
    doubted = [v for v in views if v.state is SlotState.QUARANTINED and not v.is_leased]
    best = min(free or doubted, key=_rank, default=None)
    return None if best is None else Placement(best.id, is_fork)


def _rank(view: SlotView) -> tuple[int, float]:
    if view.occupancy is None:
        return (0 if view.is_blank else 1, view.last_used)
    return (3 if view.is_dirty else 2, view.last_used)
