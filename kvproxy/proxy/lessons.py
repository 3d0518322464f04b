"""What the answer to a conversation's request teaches, for the snapshots made of it later."""

from __future__ import annotations

from kvproxy.boundary.continuations import ending_of
from kvproxy.boundary.turn import Turn
from kvproxy.checkpoint.shaper import Shaper
from kvproxy.sessions.session import Session
from kvproxy.slots.slot import Occupancy
from kvproxy.upstream.replies import Usage


def learn(shaper: Shaper, session: Session, before: Occupancy | None, after: Occupancy, usage: Usage) -> None:
    """Remember what a snapshot in the right form will need to be made, and what this answer showed.

    `before` is the stay that the request met in its slot, None if it met none; `after` what it left there.
    """
    if before is not None:
        shaper.observe(session, before, usage.prompt, usage.reused)
    session.turn = None
    if session.asked is not None:
        session.turn = Turn(session.asked, ending_of(usage.finish_reason), usage.prompt, after.revision)
