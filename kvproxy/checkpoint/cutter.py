"""Cuts what is not wanted off a snapshot before it is restored, where reading less is quicker.

A client that compacts its history, edits an early message or takes up an old branch shares only the
beginning of what was saved. The server would read all of it and drop the rest; for gigabytes that takes
seconds. What is cut is a file of its own for this one restore.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.boundary.continuations import NoBoundary
from kvproxy.boundary.prefix import LEAST_TOKENS, prompt_ids
from kvproxy.boundary.turn import Asked
from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.room import MARGIN_BYTES
from kvproxy.identifiers import SnapshotName
from kvproxy.slotfile.prefix import Uncut
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.manifest import Generation
from kvproxy.snapshots.names import new_name

LEAST_SECONDS = 0.5
"""A restore that is quicker is not worth asking how much of it is wanted: for a prompt of 100,000 tokens the
server takes up to 0.2 s to tell."""

COST = 3
"""What is cut is read, written and read again."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A file to restore in place of a longer one."""

    name: SnapshotName
    tokens: int
    size_bytes: int


def is_worth_cutting(shared: int, stored: int) -> bool:
    """Whether to move the first `shared` of `stored` tokens COST times is less than to move all once."""
    return LEAST_TOKENS <= shared and shared * COST < stored


class Cutter:
    """Of one server. `least_seconds` a restore must be thought to take."""

    def __init__(self, parts: Parts, *, least_seconds: float = LEAST_SECONDS) -> None:
        self._p = parts
        self.least_seconds = least_seconds
        self._names: set[SnapshotName] = set()

    @property
    def is_wanted(self) -> bool:
        """Whether requests have to be understood for this: a full slot would take long enough to restore."""
        if not self._is_possible:
            return False
        full = int((self._p.standing.facts.n_ctx or 0) * self._p.actions.bytes_per_token)
        return self._takes_long(full)

    def names_in_flight(self) -> frozenset[SnapshotName]:
        """Cuts that are being made or restored; no manifest will ever name them."""
        return frozenset(self._names)

    async def cut(self, generation: Generation, asked: Asked | None) -> Cut | None:
        """What to restore of `generation` for the request; None for all of it. `discard` must follow."""
        if asked is None or not (self._is_possible and self._takes_long(generation.size_bytes)):
            return None
        patience = max(LEAST_SECONDS, self._seconds(generation.size_bytes))
        ids = await prompt_ids(self._p.client, asked.label, asked.document, timeout=patience)
        if isinstance(ids, NoBoundary):
            return None
        shared = await self._p.files.shared_tokens(generation.name, ids)
        if shared is None or not is_worth_cutting(shared, generation.tokens):
            return None
        free = await self._p.files.free_bytes()
        if free is not None and free < generation.size_bytes // COST + MARGIN_BYTES:
            return None
        name = new_name(self._p.store.owner)
        self._names.add(name)
        found = await self._p.files.cut_prefix(generation.name, name, shared)
        if isinstance(found, Uncut):
            self._names.discard(name)
            return None
        return Cut(name, found.tokens, found.size_bytes)

    @property
    def _is_possible(self) -> bool:
        facts = self._p.standing.facts
        if not facts.kind.may_roll_back or facts.fingerprint is None or not self._p.files.is_visible:
            return False
        return self._p.alterations.may(Alteration.PREFIX_CUT, facts.fingerprint)

    def _takes_long(self, size_bytes: int) -> bool:
        return self._seconds(size_bytes) >= self.least_seconds

    def _seconds(self, size_bytes: int) -> float:
        """How long a restore of so much is thought to take."""
        return size_bytes / self._p.actions.restore_rate.bytes_per_second

    async def discard(self, cut: Cut) -> None:
        """The server is done with it."""
        await self._p.files.delete(cut.name)
        self._names.discard(cut.name)
