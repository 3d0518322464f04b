"""When a slot is due for a checkpoint that nobody asked for: pure.

A save stalls every slot of the server, so the idle checkpoint waits for a server in which nothing runs.
On a server that always runs something, and in an agent's loop that never pauses for the idle time, that
moment never comes: past a maximum of dirty seconds or of unsaved tokens a slot is due the moment it is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.checkpoint.outcome import Trigger
from kvproxy.identifiers import SlotId
from kvproxy.slots.slot import SlotView
from kvproxy.slots.state import SlotState


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """The `checkpoint` section as the rules need it. Zero seconds switch the idle checkpoint off."""

    on_switch: bool = True
    on_idle_seconds: float = 30.0
    on_turn: bool = False
    on_request: bool = False
    min_tokens: int = 256
    max_dirty_seconds: float = 300.0
    max_unsaved_tokens: int = 16384

    @property
    def is_periodic(self) -> bool:
        return self.on_idle_seconds > 0


@dataclass(frozen=True, slots=True)
class Due:
    slot: SlotId
    trigger: Trigger


def next_due(views: Sequence[SlotView], policy: CheckpointPolicy, now: float) -> tuple[Due, ...]:
    """The slots to save now, the longest dirty first. `now` is monotonic seconds."""
    is_quiet = not any(view.state in (SlotState.SERVING, SlotState.CANCELLING) for view in views)
    waiting = sorted((view for view in views if _is_candidate(view, policy)), key=_dirty_since)
    due = ((view, _trigger(view, policy, now, is_quiet=is_quiet)) for view in waiting)
    return tuple(Due(view.id, trigger) for view, trigger in due if trigger is not None)


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
    return (
        view.is_free
        and occupancy is not None
        and occupancy.is_dirty
        and is_worth_saving(occupancy.tokens, policy)
    )


def _dirty_since(view: SlotView) -> float:
    since = view.occupancy.dirty_since if view.occupancy else None
    return view.last_used if since is None else since


def _trigger(view: SlotView, policy: CheckpointPolicy, now: float, *, is_quiet: bool) -> Trigger | None:
    if not policy.is_periodic:
        return None
    if is_quiet and now - view.last_used >= policy.on_idle_seconds:
        return Trigger.IDLE
    too_old = now - _dirty_since(view) >= policy.max_dirty_seconds
    unsaved = view.occupancy.unsaved_tokens if view.occupancy else 0
    return Trigger.AGE if too_old or unsaved >= policy.max_unsaved_tokens else None
