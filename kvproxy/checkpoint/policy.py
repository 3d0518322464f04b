"""When a slot is due for a checkpoint that nobody asked for: pure.

A save stalls every slot of the server, so the idle checkpoint waits for a server in which nothing runs.
On a server that always runs something, and in an agent's loop that never pauses for the idle time, that
moment never comes: past a maximum of dirty seconds or of unsaved tokens a slot is due the moment it is free.

Where more conversations live than slots, the next one to come will have to wait until its victim is saved.
So under such pressure the victims to be are saved ahead of the switch, the next one first, if that is cheap.
Never the slot that was used last: its conversation goes on, and saving it after each answer would be waste.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvproxy.checkpoint.outcome import Trigger
from kvproxy.identifiers import SlotId
from kvproxy.slots.placement import place
from kvproxy.slots.slot import SlotView
from kvproxy.slots.state import UNDER_WAY


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """The `checkpoint` section as the rules need it. A zero switches its rule off."""

    on_switch: bool = True
    on_idle_seconds: float = 30.0
    on_turn: bool = False
    on_request: bool = False
    min_tokens: int = 256
    max_dirty_seconds: float = 300.0
    max_unsaved_tokens: int = 16384


@dataclass(frozen=True, slots=True)
class Due:
    slot: SlotId
    trigger: Trigger


def next_due(views: Sequence[SlotView], policy: CheckpointPolicy, now: float) -> tuple[Due, ...]:
    """The slots to save now, the longest dirty first. `now` is monotonic seconds."""
    waiting = [view for view in views if _is_candidate(view, policy)]
    if not waiting:
        return ()
    waiting.sort(key=_dirty_since)
    due = [(view, trigger) for view in waiting if (trigger := _trigger(view, policy, now, views))]
    return tuple(Due(view.id, trigger) for view, trigger in due) if due else ()


PRESSURE_SECONDS = 600.0
"""How long after a switch another one is to be expected."""

CHEAP_SECONDS = 0.05
"""A stall of the server that nobody notices."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """`last_switch` is monotonic seconds, None if no slot ever changed hands; `save_seconds` estimates a
    save of so many tokens."""

    last_switch: float | None
    save_seconds: Callable[[int | None], float]


def save_ahead(
    views: Sequence[SlotView], policy: CheckpointPolicy, pressure: Pressure, now: float
) -> Due | None:
    """The next victim of a switch that is not saved, if saving it now costs nobody anything."""
    if pressure.last_switch is None:
        return None
    is_pressed = now - pressure.last_switch <= PRESSURE_SECONDS
    placement = place(None, views) if is_pressed and policy.on_switch else None
    if placement is None or any(v.id == placement.slot and v.occupancy is None for v in views):
        return None
    latest = _latest(views)
    dirty = [view for view in views if view.id != latest and _is_candidate(view, policy)]
    victim = min(dirty, key=lambda view: view.last_used, default=None)
    if victim is None:
        return None
    cost = pressure.save_seconds(victim.occupancy.tokens if victim.occupancy else None)
    if cost > CHEAP_SECONDS and (_is_busy(views) or now - victim.last_used < cost):
        return None
    return Due(victim.id, Trigger.SWITCH)


def _latest(views: Sequence[SlotView]) -> SlotId:
    """The slot in use now, or used last."""
    return max(views, key=lambda view: (view.state in UNDER_WAY or view.is_leased, view.last_used)).id


def _is_busy(views: Sequence[SlotView]) -> bool:
    return any(view.state in UNDER_WAY for view in views)


def is_worth_saving(tokens: int | None, policy: CheckpointPolicy) -> bool:
    """An unknown count (a request that was dropped) is saved: the server will tell."""
    return tokens is None or tokens >= policy.min_tokens


def after_request(policy: CheckpointPolicy, *, ends_exchange: bool) -> Trigger | None:
    """The checkpoint that a finished request asks for, if any."""
    if policy.on_request:
        return Trigger.REQUEST
    return Trigger.TURN if policy.on_turn and ends_exchange else None


def _is_candidate(view: SlotView, policy: CheckpointPolicy) -> bool:
    occupancy = view.occupancy
    if occupancy is None or not occupancy.is_dirty:
        return False
    return view.is_free and is_worth_saving(occupancy.tokens, policy)


def _dirty_since(view: SlotView) -> float:
    since = view.occupancy.dirty_since if view.occupancy else None
    return view.last_used if since is None else since


def _trigger(
    view: SlotView, policy: CheckpointPolicy, now: float, views: Sequence[SlotView]
) -> Trigger | None:
    idle, age = policy.on_idle_seconds, policy.max_dirty_seconds
    if idle > 0 and now - view.last_used >= idle and not _is_busy(views):
        return Trigger.IDLE
    unsaved = view.occupancy.unsaved_tokens if view.occupancy else 0
    is_old = age > 0 and now - _dirty_since(view) >= age
    is_much = 0 < policy.max_unsaved_tokens <= unsaved
    return Trigger.AGE if is_old or is_much else None
