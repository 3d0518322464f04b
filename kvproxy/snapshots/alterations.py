"""What may be done to snapshot files, by what the answers proved of it.

An altered file is right by what is known of the server it is for. The answer after each restore shows whether
that holds; the first that shows it does not is the last there.
"""

from __future__ import annotations

from enum import StrEnum

from kvproxy.snapshots.fingerprint import Fingerprint


class Alteration(StrEnum):
    WINDOW_EDIT = "window_edit"
    """The sliding window of a copy was opened (see `slotfile.window`)."""
    PREFIX_CUT = "prefix_cut"
    """Only the first tokens were kept (see `slotfile.prefix`)."""


class Alterations:
    """`allowed` are those that the settings and the directories allow."""

    def __init__(self, allowed: frozenset[Alteration]) -> None:
        self._allowed = allowed
        self._missed: set[tuple[Alteration, str]] = set()

    def may(self, alteration: Alteration, present: Fingerprint) -> bool:
        """Whether files for a server of this fingerprint may be altered so."""
        return alteration in self._allowed and (alteration, present.digest) not in self._missed

    def missed(self, alteration: Alteration, present: Fingerprint) -> None:
        """What was altered so was restored at such a server, and not reused."""
        self._missed.add((alteration, present.digest))
