"""Opens the sliding window of a fresh snapshot: off the loop, off every request's path, in a copy.

The server's own file is left as it wrote it, and goes once the copy is published. Where the window cannot be
opened the snapshot stays as it is: it costs a cold prompt at this server, as all did before.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.room import MARGIN_BYTES
from kvproxy.errors import ErrorCode
from kvproxy.identifiers import SnapshotName
from kvproxy.slotfile.window import Closed
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Origin
from kvproxy.snapshots.names import new_name
from kvproxy.telemetry.events import Warned


@dataclass(frozen=True, slots=True)
class Written:
    """The file to publish; `origin` says of which one it was made, None if the server wrote it."""

    name: SnapshotName
    origin: Origin | None = None

    @property
    def names(self) -> tuple[SnapshotName, ...]:
        """All files that belong to it."""
        return (self.name,) if self.origin is None else (self.name, self.origin.name)


class Opener:
    """Of one server."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._names: set[SnapshotName] = set()
        self._is_told = False

    def names_in_flight(self) -> frozenset[SnapshotName]:
        """Copies that no manifest names yet."""
        return frozenset(self._names)

    async def open(self, name: SnapshotName, size_bytes: int, fingerprint: Fingerprint) -> Written:
        """The snapshot `name` of a server of `fingerprint` as it is to be published. `landed` must follow."""
        facts = self._p.standing.facts
        if facts.window.opened is None or facts.fingerprint != fingerprint:
            return Written(name)
        copy = new_name(self._p.store.owner)
        self._names.add(copy)
        refusal = await self._copy(name, copy, size_bytes, facts.window.opened)
        if refusal is None:
            self._is_told = False
            return Written(copy, Origin(alteration=Alteration.WINDOW_EDIT, name=name))
        self._names.discard(copy)
        if refusal is not Closed.NO_WINDOW:  # no token has left it yet: nothing is amiss
            self._tell(refusal)
        return Written(name)

    async def _copy(
        self, name: SnapshotName, copy: SnapshotName, size_bytes: int, window: int
    ) -> Closed | None:
        """A disk that is filled to the brim is everybody's trouble: what may not fit is not begun."""
        free = await self._p.files.free_bytes()
        if free is not None and free < size_bytes + MARGIN_BYTES:
            return Closed.NO_ROOM
        return await self._p.files.open_window(name, copy, window)

    def landed(self, written: Written) -> None:
        """The file was published, or deleted."""
        self._names.discard(written.name)

    def _tell(self, refusal: Closed) -> None:
        if not self._is_told:
            self._is_told = True
            reason = f"the window of a snapshot could not be opened ({refusal})"
            self._p.emit(Warned(f"{reason}: its conversation will begin cold", ErrorCode.SAVE_FAILED))
