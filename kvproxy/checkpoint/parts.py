"""What saving and restoring work with: all of one server, put together by the house."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvproxy.checkpoint.actions import SlotActions
from kvproxy.clock import Clock
from kvproxy.identifiers import Epoch, ServerName, SlotId
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.slots.state import SlotState
from kvproxy.slots.table import SlotTable
from kvproxy.snapshots.alterations import Alterations
from kvproxy.snapshots.files import SnapshotFiles
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.store import SnapshotStore
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Emit
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.facts import Standing


class Unable(Protocol):
    """Called when it was seen in `epoch` that the server cannot save and restore, or that it is of no use;
    `still_saves`: the next life of the server may have use for what is saved."""

    def __call__(self, epoch: Epoch, reason: str, *, still_saves: bool = False) -> None: ...


class Shares(Protocol):
    """Called when it was seen in `epoch` whether all slots share one memory."""

    def __call__(self, epoch: Epoch, shares: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    server: ServerName
    client: LlamaServer
    standing: Standing
    table: SlotTable
    actions: SlotActions
    files: SnapshotFiles
    store: SnapshotStore
    registry: SessionRegistry
    tasks: TaskSet
    clock: Clock
    emit: Emit
    slots_changed: Callable[[], None]
    """Called when a slot became usable behind the back of every lease."""
    emptied: Callable[[SlotId], None]
    """Called when a slot that should have held tokens held none."""
    unable: Unable
    shares: Shares
    found_kind: Callable[[Epoch, MemoryKind], None]
    """Called when a file of that epoch's server showed the kind of its memory."""
    alterations: Alterations = field(default_factory=lambda: Alterations(frozenset()))

    @property
    def is_serving(self) -> bool:
        """Whether a batch may be running that a slot action has to wait for."""
        return any(view.state is SlotState.SERVING for view in self.table.views())

    async def obstacle(self) -> str:
        """Why nothing can be kept, by a look at the directories now; empty if it can. What failed under one
        says nothing of how well the server saves."""
        return await self.store.why_unusable() or (await self.files.at_sight(())).fault
