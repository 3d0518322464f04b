"""Follows each restore to the answer that proves it, and draws the conclusions."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.checkpoint.outcome import Verdict
from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.trust import Trust, is_saving_useless, likely_reason
from kvproxy.errors import ErrorCode
from kvproxy.identifiers import Epoch, SessionKey, SlotId, SnapshotName
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.telemetry.events import Warned
from kvproxy.upstream.facts import WINDOW_MISSED

MISSED = "restored twice with success, and the answers reused nothing of it"

OPENED_MISSED = "its window was opened, it was restored with success, and the answer reused nothing of it"

CUT_MISSED = (
    "a snapshot cut to what a prompt shares with it was not reused; none is cut at this server any more"
)

_MISSES = (Verdict.INEFFECTIVE, Verdict.DIVERGED)
"""Of an altered file: the prompt was seen to begin with all that was restored."""


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore that ended well."""

    epoch: Epoch
    key: SessionKey
    fingerprint: Fingerprint
    """The snapshot's."""
    present: Fingerprint
    """The server's."""
    name: SnapshotName
    alteration: Alteration | None = None
    """What had been done to the file that was restored."""


class Proofs:
    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._trust = Trust()
        self._awaited: dict[SlotId, Restore] = {}

    def expect(self, slot: SlotId, restore: Restore) -> None:
        """The next answer from `slot` will tell what the restore was good for."""
        self._awaited[slot] = restore

    def proved(self, slot: SlotId, key: SessionKey, verdict: Verdict) -> None:
        """What the first answer to `key` after a restore into `slot` proved of it."""
        restore = self._awaited.pop(slot, None)
        if restore is None or restore.key != key or restore.epoch != self._p.table.epoch:
            return
        if restore.alteration is not None and verdict in _MISSES:
            self._give_up(restore, restore.alteration)
            return
        if self._p.standing.facts.is_volatile:
            return  # what was restored may have been cleared since, which is no fault of the restore
        life = (restore.epoch, restore.fingerprint)
        conclusion = self._trust.proved(life, key, restore.name, verdict)
        if conclusion.switches_off:
            self._p.tasks.spawn(self._switch_off(restore), name="switch restoring off")
        elif conclusion.retires:
            self._p.tasks.spawn(self._retire(restore, MISSED), name="retire a snapshot")

    def _give_up(self, restore: Restore, alteration: Alteration) -> None:
        """One miss of an altered file is enough: what it was altered by does not hold here."""
        self._p.alterations.missed(alteration, restore.present)
        if alteration is Alteration.WINDOW_EDIT:
            self._p.unable(restore.epoch, WINDOW_MISSED)
            self._p.tasks.spawn(self._retire(restore, OPENED_MISSED), name="retire a snapshot")
        else:
            self._p.emit(Warned(CUT_MISSED, ErrorCode.RESTORE_FAILED))

    async def _retire(self, restore: Restore, reason: str) -> None:
        await self._p.store.invalidate(restore.key, restore.fingerprint, restore.name, reason)

    async def _switch_off(self, restore: Restore) -> None:
        """The snapshots stay as they are: the server is at fault, and may be started otherwise."""
        kind = await self._p.files.kind_of(restore.name)
        self._p.unable(restore.epoch, likely_reason(kind), still_saves=not is_saving_useless(kind))
