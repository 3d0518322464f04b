"""When a slot whose request was dropped may be believed idle again: pure.

A dropped request may not have been launched yet: the server still parses or tokenises it, or its loop
sits in another slot's batch, while `/slots` (which answers inside a batch) says that the slot is idle.
Pinning another request there now would meet the dropped one at its launch.

So a slot that was *seen* to run the request is idle as soon as it is seen idle. One that was not must
stay quiet for `QUIET_SECONDS` plus the time a body of its size takes to be tokenised, counted only while
the loop is known to turn: no other slot is processing, or those that are have made progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvproxy.identifiers import SlotId
from kvproxy.upstream.replies import SlotInfo

QUIET_SECONDS = 2.0
"""Twice the second in which llama-server looks at a client's socket."""

TOKENISED_BYTES_PER_SECOND = 1_000_000
"""A pessimistic rate for parsing, templating and tokenising a body."""


@dataclass(frozen=True, slots=True)
class Settling:
    """What is known of one dropped request. Times are monotonic seconds."""

    slot: SlotId
    was_seen: bool
    """The request was seen to run (headers came, or `/slots` said so)."""
    body_bytes: int = 0
    quiet_seconds: float = 0.0
    last_look: float | None = None
    last_progress: int = -1

    @property
    def required_seconds(self) -> float:
        return QUIET_SECONDS + self.body_bytes / TOKENISED_BYTES_PER_SECOND


def look(settling: Settling, infos: Sequence[SlotInfo], now: float) -> Settling | None:
    """After a look at the slots: the state of waiting, or None when the slot is idle."""
    own = next((info for info in infos if info.id == settling.slot), None)
    if own is None:
        return None  # fewer slots than before: another life of the server, which the watch deals with
    progress = sum(info.progress for info in infos if info.is_processing)
    seen = replace(settling, last_look=now, last_progress=progress)
    if own.is_processing:
        return replace(seen, was_seen=True, quiet_seconds=0.0)
    if settling.was_seen:
        return None
    others_run = any(info.is_processing for info in infos)
    turns = not others_run or progress != settling.last_progress
    if settling.last_look is not None and turns:
        seen = replace(seen, quiet_seconds=settling.quiet_seconds + now - settling.last_look)
    return None if seen.quiet_seconds >= seen.required_seconds else seen
