"""Switches persistence off while we cannot keep anything, whatever the server allows, and on again after."""

from __future__ import annotations

from kvproxy.identifiers import Epoch
from kvproxy.upstream.facts import Persistence, PersistenceMode
from kvproxy.upstream.watch import Watch, WatchParts


class Obstruction:
    def __init__(self, parts: WatchParts, watch: Watch) -> None:
        self._p = parts
        self._watch = watch
        self._set_aside: tuple[Epoch, Persistence] | None = None
        """What was known of the server's own before, and in which life."""

    async def set(self, obstacle: str) -> None:
        """`obstacle` is why nothing can be kept; empty if it can."""
        before, self._p.standing.obstacle = self._p.standing.obstacle, obstacle
        epoch, known = self._p.table.epoch, self._p.standing.facts.persistence
        is_ours = bool(before) and known.reason == before
        if obstacle and (is_ours or known.may_save):
            if not is_ours:
                self._set_aside = epoch, known
            self._watch.found_persistence(epoch, Persistence(PersistenceMode.OFF, obstacle))
        elif is_ours and not obstacle:
            self._watch.found_persistence(epoch, await self._found(epoch))

    async def _found(self, epoch: Epoch) -> Persistence:
        """What the server allows; it has to be asked if this life of it began under an obstacle."""
        if self._set_aside is not None and self._set_aside[0] == epoch:
            return self._set_aside[1]
        return await self._p.introduction.find_persistence()
