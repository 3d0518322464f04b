"""Follows each restore to the answer that proves it, and draws the conclusions."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.checkpoint.outcome import Verdict
from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.trust import Trust, is_saving_useless, likely_reason
from kvproxy.identifiers import Epoch, SessionKey, SlotId, SnapshotName
from kvproxy.snapshots.fingerprint import Fingerprint

MISSED = "restored twice with success, and the answers reused nothing of it"


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore that ended well."""

    epoch: Epoch
    key: SessionKey
    fingerprint: Fingerprint
    name: SnapshotName


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
        if self._p.standing.facts.is_volatile:
            return  # what was restored may have been cleared since, which is no fault of the restore
        life = (restore.epoch, restore.fingerprint)
        conclusion = self._trust.proved(life, key, restore.name, verdict)
        if conclusion.switches_off:
            self._p.tasks.spawn(self._switch_off(restore), name="switch restoring off")
        elif conclusion.retires:
            self._p.tasks.spawn(self._retire(restore), name="retire a snapshot")

    async def _retire(self, restore: Restore) -> None:
        await self._p.store.invalidate(restore.key, restore.fingerprint, restore.name, MISSED)

    async def _switch_off(self, restore: Restore) -> None:
        """The snapshots stay as they are: the server is at fault, and may be started otherwise."""
        kind = await self._p.files.kind_of(restore.name)
        self._p.unable(restore.epoch, likely_reason(kind), still_saves=not is_saving_useless(kind))
