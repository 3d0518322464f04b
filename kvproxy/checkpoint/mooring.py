"""Makes fast what an answer left in a slot that cannot be believed for long.

A server that clears idle slots does so at the next launch, whoever's that is. So each answer is saved at its
end, under its own lease, which keeps the next request from being launched: a session is *moored* when its
file is written (the publication may go on beside). One that could not be saved is *adrift*: what it had
computed is at most in the server's own memory, and its next request is not pinned, so that the server finds
it there.
"""

from __future__ import annotations

from kvproxy.checkpoint.checkpointer import Checkpointer
from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.checkpoint.policy import CheckpointPolicy
from kvproxy.checkpoint.publisher import Checkpoint
from kvproxy.identifiers import Epoch, Revision, SessionKey, SlotId
from kvproxy.slots.slot import Occupancy, SlotView
from kvproxy.slots.state import SlotState
from kvproxy.slots.table import SlotTable


class Moorings:
    def __init__(self, table: SlotTable, checkpointer: Checkpointer, policy: CheckpointPolicy) -> None:
        self._table = table
        self._checkpointer = checkpointer
        self._policy = policy

    @property
    def are_needed(self) -> bool:
        """Whether this server clears idle slots."""
        return self._table.is_volatile

    def is_adrift(self, session: SessionKey) -> bool:
        """Whether the next request of `session` is to be left to the server's choice."""
        is_adrift = self._table.is_adrift(session)
        return is_adrift and self._checkpointer.publisher.running(session, Revision(0)) is None

    @property
    def loose(self) -> tuple[SlotView, ...]:
        """Slots left by dropped requests, seen idle since: nobody has saved them."""
        return tuple(filter(self._is_loose, self._table.views())) if self.are_needed else ()

    def _is_loose(self, view: SlotView) -> bool:
        stay = view.occupancy
        if stay is None or not stay.is_dirty or not view.is_free:
            return False
        return self._checkpointer.publisher.running(stay.session, stay.revision) is None

    async def moor_loose(self, epoch: Epoch) -> None:
        """For one who is about to launch a request, and while nobody else may."""
        for view in self.loose:
            if view.occupancy is not None and epoch == self._table.epoch:
                await self.moor(view.id, epoch, view.occupancy)

    async def moor(self, slot: SlotId, epoch: Epoch, stay: Occupancy) -> None:
        """Save `stay`, which an answer has just left in `slot`; adrift if that does not come about."""
        if epoch == self._table.epoch and not await self._is_written(slot, epoch, stay):
            self._table.drift(stay, epoch)

    async def _is_written(self, slot: SlotId, epoch: Epoch, stay: Occupancy) -> bool:
        view = self._table.view(slot)
        if view.state is not SlotState.RESIDENT or view.occupancy != stay or not self._policy.on_switch:
            return False
        result = await self._checkpointer.write(slot, epoch, Trigger.REQUEST)
        return not isinstance(result, Checkpoint) or result.outcome is CheckpointOutcome.CLEAN
