"""What the fake can be told to get wrong. Every field may be changed while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

FOREVER = -1


class Failure(StrEnum):
    """How one slot action or request fails."""

    ERROR = "error"
    """500, nothing done"""
    HANG = "hang"
    """no answer, ever; nothing done"""
    CLOSE = "close"
    """connection cut instead of an answer; nothing done"""
    LOST_ANSWER = "lost_answer"
    """done, but the connection is cut instead of an answer"""
    GARBAGE = "garbage"
    """done, but the answer is not JSON"""
    SHORT_FILE = "short_file"
    """save only: 200 with full counts, file shorter than told (a disk that fills up at the end)"""
    FULL_DISK = "full_disk"
    """save only: 500, and the file of that name is cut to a stump"""


@dataclass(slots=True)
class Planned:
    failure: Failure
    times: int = FOREVER


@dataclass(slots=True)
class Faults:
    slow_first_token: float = 0.0
    """seconds between the prompt's start (stream headers) and the first token"""
    token_delay: float = 0.0
    """seconds per generated token"""
    prefill_rate: float = 0.0
    """prompt tokens per second, 0 is at once; a batch of the prompt blocks slot actions as in the original"""
    batch: int = 2048
    """prompt tokens per batch"""
    http_poll: float = 1.0
    """seconds without any result after which the server looks whether the client is still there"""

    ping_every: float = 0.0
    """seconds between comment lines in a stream, 0 is never; the original pings after 30 s of silence"""
    cut_stream_after: int = 0
    """the connection of a stream is cut after this many events, 0 is never"""
    slow_end: float = 0.0
    """seconds between the last event of a stream and the end of the answer, with the slot idle already"""
    drop_idle_after: float = 0.0
    """seconds after an answer at which an idle connection is closed without a word, 0 is off"""
    frozen: bool = False
    """accepts connections, answers nothing (a stopped process)"""
    loading: bool = False
    """503 on every route"""

    late_actions: float = 0.0
    """a slot action is only queued after this many seconds, even if its connection is gone by then"""
    save_seconds: float = 0.0
    """how long a save holds up the whole server"""
    restore_seconds: float = 0.0
    n_saved_delta: int = 0
    """added to the count a save tells"""
    n_restored_delta: int = 0
    id_slot_delta: int = 0
    """added to the slot id an action echoes"""
    short_by: int = 2600
    """bytes missing from a short file"""

    unpinned_slot: int | None = None
    """unpinned requests take this slot if it is idle"""
    mix_on_busy: bool = False
    """a pinned request that finds its slot busy puts its own content under the running answer"""
    out_of_room: int = 0
    """so many requests that generate find the memory full, whatever it holds, and their slots are emptied"""
    useless_restores: bool = False
    """a restored slot reuses nothing (sliding window without a full cache)"""

    planned: dict[str, Planned] = field(default_factory=dict)
    """by kind: save, restore, erase, or completion"""

    def fail(self, kind: str, failure: Failure | str, times: int = FOREVER) -> None:
        self.planned[kind] = Planned(Failure(failure), times)

    def take(self, kind: str) -> Failure | None:
        plan = self.planned.get(kind)
        if plan is None or plan.times == 0:
            return None
        if plan.times > 0:
            plan.times -= 1
        return plan.failure


def set_fault(faults: Faults, text: str) -> None:
    """Applies one NAME=VALUE; save, restore, erase and completion take FAILURE or FAILURE:TIMES.

    Raises ValueError naming what is not known.
    """
    name, _, value = text.partition("=")
    if name in ("save", "restore", "erase", "completion"):
        failure, _, times = value.partition(":")
        faults.fail(name, failure, int(times) if times else FOREVER)
        return
    known = {f.name: f for f in fields(Faults) if f.name != "planned"}
    if name not in known:
        raise ValueError(f"unknown fault {name!r}; known: {', '.join(sorted(known))}")
    setattr(faults, name, _parse(getattr(faults, name), value))


def _parse(current: Any, value: str) -> Any:
    if isinstance(current, bool):
        return value.lower() in ("1", "true", "yes", "on")
    return int(value) if current is None else type(current)(value)
