"""What is known of one conversation, and the state that is shown for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvproxy.boundary.evidence import Evidence
from kvproxy.boundary.turn import Asked, Turn
from kvproxy.checkpoint.outcome import Preparation, Verdict
from kvproxy.identifiers import Revision, SessionKey
from kvproxy.slots.needs import Measure
from kvproxy.slots.slot import SlotView
from kvproxy.slots.state import SlotState


class SessionState(StrEnum):
    NONE = "none"
    COLD = "cold"
    RESTORING = "restoring"
    ACTIVE_CLEAN = "active_clean"
    ACTIVE_DIRTY = "active_dirty"
    SAVING = "saving"
    SAVED = "saved"
    INVALID = "invalid"


@dataclass(slots=True)
class Session:
    """A record of the registry. `revision` is the highest any stay of the session reached; `last_seen` is
    Unix seconds; `may_persist` is False once a client forbade the disk for this conversation."""

    key: SessionKey
    client_digest: str
    model: str
    last_seen: float
    revision: Revision
    namespace: str = ""
    """Where its id was found; `content` for one that is known by what was said; empty if not seen since."""
    branch: str = ""
    """Which of the conversations of its id it is."""
    parent: SessionKey | None = None
    """The session it comes from: that of the agent which began it, or of which it is a fork."""
    requests: int = 0
    may_persist: bool = True
    is_passing: bool = False
    """It began where conversations did not go on, and has not gone on yet: it is not worth a save."""
    was_resident: bool = False
    """It lived in a slot of the server's present or an earlier life."""
    lost_to_restart: bool = False
    """Its stay ended with a life of the server."""
    opening: bytes | None = None
    """A digest of how its newest request opened; None if short or unknown."""
    asked: Asked | None = None
    """Its newest request, until that was answered, where what to restore for it depends on what it says."""
    turn: Turn | None = None
    """Its last turn that was answered, while it lives in a slot, where the server's memory cannot roll
    back."""
    evidence: Evidence = field(default_factory=Evidence)
    """What its requests have shown of how the client sends replies back."""
    measure: Measure | None = None
    """Of its newest request that was answered."""
    preparation: Preparation | None = None
    verdict: Verdict = Verdict.UNKNOWN

    def answered(self, document: object) -> None:
        """The request of that document is over: it is held no longer. A newer one may wait."""
        if self.asked is not None and self.asked.document is document:
            self.asked = None


def state_of(view: SlotView | None, *, has_valid: bool, has_invalid: bool) -> SessionState:
    """The session's state from its slot, if it has one, and from what is stored of it."""
    if view is not None:
        if view.state is SlotState.SAVING:
            return SessionState.SAVING
        if view.state is SlotState.RESTORING:
            return SessionState.RESTORING
        return SessionState.ACTIVE_DIRTY if view.is_dirty else SessionState.ACTIVE_CLEAN
    if has_valid:
        return SessionState.SAVED
    return SessionState.INVALID if has_invalid else SessionState.COLD
