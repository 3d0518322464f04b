"""What a request of a session makes of its stay in a slot."""

from __future__ import annotations

from kvproxy.identifiers import Revision
from kvproxy.sessions.session import Session
from kvproxy.slots.slot import Occupancy
from kvproxy.upstream.replies import Usage


def new_stay(session: Session) -> Occupancy:
    """The stay that begins with this request."""
    return Occupancy(session.key, session.revision, session.revision)


def stay_after(stay: Occupancy, usage: Usage, now: float) -> Occupancy:
    """`stay` after a complete answer; `now` is monotonic seconds."""
    return stay.changed(now, tokens_after(usage), (usage.computed or 0) + (usage.generated or 0))


def tokens_after(usage: Usage) -> int | None:
    """What a complete answer leaves in its slot; None where it did not tell."""
    # The last token was sampled, but never computed: it is not in the slot.
    prompt = usage.prompt
    return None if prompt is None else prompt + max(0, (usage.generated or 0) - 1)


def remember(session: Session, stay: Occupancy | None) -> None:
    """Write down that a request of `session` ran; `stay` is what it left in its slot."""
    session.requests += 1
    session.was_resident, session.lost_to_restart = True, False
    if stay is not None:
        session.revision = Revision(max(session.revision, stay.revision))
