"""What the answer to a conversation's request teaches, for the snapshots made of it later."""

from __future__ import annotations

from kvproxy.boundary.continuations import ending_of
from kvproxy.boundary.turn import Asked, Turn
from kvproxy.checkpoint.shaper import Shaper
from kvproxy.sessions.session import Session
from kvproxy.slots.slot import Occupancy
from kvproxy.upstream.replies import Usage


def learn(
    shaper: Shaper,
    session: Session,
    asked: Asked | None,
    before: Occupancy | None,
    after: Occupancy,
    usage: Usage,
) -> None:
    """Remember what a snapshot in the right form will need to be made, and what this answer showed.

    `asked` is the request that was answered: a newer one of the session may wait by now. `before` is the stay
    that it met in its slot, None if it met none; `after` what it left there.
    """
    if before is not None:
        shaper.observe(session, before, usage.prompt, usage.reused)
    ended = ending_of(usage.finish_reason)
    shaper.remember(session, None if asked is None else Turn(asked, ended, usage.prompt, after.revision))
