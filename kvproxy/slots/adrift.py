"""The sessions whose newest work is in no file and in no slot that may be believed."""

from __future__ import annotations

from kvproxy.identifiers import Revision, SessionKey
from kvproxy.slots.slot import Occupancy

MOST_ADRIFT = 1000
"""Of those that went before these, the server's own memory of prompts has long let go."""


class Adrift:
    """Each with the revision that is missing, in the order in which they went."""

    def __init__(self) -> None:
        self._revisions: dict[SessionKey, Revision] = {}

    def __contains__(self, session: SessionKey) -> bool:
        return session in self._revisions

    def add(self, stay: Occupancy) -> None:
        self._revisions.pop(stay.session, None)
        self._revisions[stay.session] = stay.revision
        if len(self._revisions) > MOST_ADRIFT:
            del self._revisions[next(iter(self._revisions))]

    def back(self, session: SessionKey) -> None:
        """It lives in a slot again."""
        self._revisions.pop(session, None)

    def saved(self, session: SessionKey, revision: Revision) -> None:
        """That revision of it is in a file."""
        if self._revisions.get(session, revision + 1) <= revision:
            del self._revisions[session]
