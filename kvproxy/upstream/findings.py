"""What shows itself of a server while it lives: what it cannot do, what it does behind our back, what came to
light after the first questions. Each finding belongs to one epoch, and is written down once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from kvproxy.clock import Clock
from kvproxy.errors import ErrorCode
from kvproxy.identifiers import Epoch, ServerName, SlotId
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.slots.leases import LeaseDesk
from kvproxy.slots.table import SlotTable
from kvproxy.snapshots.fingerprint import CANARY_FIELD, Fingerprint
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import (
    Emit,
    SharedMemorySeen,
    VolatileSlotsSeen,
    Warned,
)
from kvproxy.upstream.acquaintance import (
    Introduction,
)
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.facts import (
    VOLATILE_ADVICE,
    Persistence,
    PersistenceMode,
    ServerState,
    Standing,
)
from kvproxy.upstream.replies import Props, SlotInfo
from kvproxy.upstream.trial import NOTHING_SEEN, Trial


async def _not_known(slots: Sequence[SlotInfo]) -> bool | None:
    return None


@dataclass(frozen=True, slots=True)
class WatchParts:
    server: ServerName
    client: LlamaServer
    standing: Standing
    table: SlotTable
    desk: LeaseDesk
    registry: SessionRegistry
    tasks: TaskSet
    clock: Clock
    emit: Emit
    introduction: Introduction
    line_stands: Callable[[], bool]
    """Whether the sentinel's connection stands: a server that is only slow still holds it."""
    look: Callable[[], None]
    """Called when slots wait to be seen idle."""
    process_changed: Callable[[], None]
    """Called when another process answers: connections to the one before are of no use."""
    try_out: Callable[[Sequence[SlotInfo]], Awaitable[Trial]]
    """Tries out, while nothing is granted, what the server does not tell of its slots."""
    honours_messages_pin: Callable[[Sequence[SlotInfo]], Awaitable[bool | None]] = _not_known
    """Tries out likewise whether `/v1/messages` runs in the slot that it names."""
    readopt: Callable[[Props, tuple[SlotInfo, ...]], None] = lambda props, slots: None
    """Called at the first look at the slots since kvproxy started."""


class Findings:
    """Writes what is found into the standing, the table and the desk. `trial` is what the present life was
    tried out for."""

    def __init__(self, parts: WatchParts) -> None:
        self._p = parts
        self._warned_of_others = False
        self.trial = NOTHING_SEEN

    def found_foreign(self, slots: Sequence[SlotId]) -> None:
        """Somebody else ran something in `slots`, and what we believed of them is gone."""
        if self._warned_of_others:
            return
        self._warned_of_others = True
        named = ", ".join(str(slot) for slot in slots)
        self._p.emit(
            Warned(
                f"somebody else uses the server {self._p.server} (seen in slot {named}): conversations lose "
                "their slots to them; let all requests go through kvproxy"
            )
        )

    def found_persistence(self, epoch: Epoch, persistence: Persistence) -> None:
        """What can be kept has changed on our side, in the life that began with `epoch`."""
        facts = replace(self._p.standing.facts, persistence=persistence)
        if epoch == self._p.table.epoch:
            answers = facts.state in (ServerState.HEALTHY, ServerState.DEGRADED)
            self._p.standing.set(persistence=persistence, **(facts.as_is() if answers else {}))

    def found_unable(self, epoch: Epoch, reason: str, *, still_saves: bool = False) -> None:
        """What happened in `epoch` showed that restoring is of no use here, or cannot be done at all: off,
        until another life of the server."""
        known = self._p.standing.facts.persistence
        says_more = known.is_on or (known.still_saves and not still_saves)
        if epoch != self._p.table.epoch or not says_more:
            return
        off = Persistence(PersistenceMode.OFF, reason, still_saves)
        self._p.standing.set(state=ServerState.DEGRADED, reason=reason, persistence=off)
        what = "nothing is restored" if still_saves else "nothing is saved or restored"
        self._p.emit(
            Warned(f"{what} until the server is started again: {reason}", ErrorCode.BACKEND_UNSUPPORTED)
        )

    def found_canary(self, epoch: Epoch, fingerprint: Fingerprint) -> None:
        """The life that began with `epoch` could be asked for its canary after all."""
        if epoch == self._p.table.epoch:
            self._p.standing.set(fingerprint=fingerprint, canary=fingerprint.get(CANARY_FIELD))

    def found_kind(self, epoch: Epoch, kind: MemoryKind) -> None:
        """A file that was seen in `epoch` shows the kind of memory, which nothing has told before."""
        if epoch == self._p.table.epoch and self._p.standing.facts.kind is MemoryKind.UNKNOWN:
            self._p.standing.set(kind=kind)

    def found_shared(self, epoch: Epoch, shares: bool) -> None:
        """It was seen in `epoch` whether all slots share one memory. If they do, only what fits beside each
        other runs side by side."""
        facts = self._p.standing.facts
        if epoch != self._p.table.epoch or facts.shares_memory is not None:
            return
        self._p.standing.set(shares_memory=shares)
        if shares and facts.n_ctx is not None and facts.slots > 1:
            self._p.table.pool = facts.n_ctx
            self._p.emit(SharedMemorySeen(self._p.server, facts.n_ctx))

    def found_volatile(self) -> None:
        """The server was seen to clear idle slots: save each answer and launch one request at a time; where
        nothing can be saved, leave the choice of slots to it."""
        facts = self._p.standing.facts
        if facts.is_volatile or self.trial.clears is False:  # then it was for want of room, or a stranger
            return
        if facts.props is not None:
            work = self._p.introduction.found_volatile(facts.props)
            self._p.tasks.spawn(work, name="remember that slots are cleared")
        if facts.persistence.is_on:
            facts = replace(facts, is_volatile=True)
            self._p.table.found_volatile()
        else:
            off = Persistence(PersistenceMode.OFF, VOLATILE_ADVICE)
            facts = replace(facts, is_volatile=True, persistence=off, pins=False)
            self._p.desk.stop_pinning()
        self._p.standing.set(
            is_volatile=True, persistence=facts.persistence, pins=facts.pins, **facts.as_is()
        )
        self.found_shared(self._p.table.epoch, True)  # only such a server clears idle slots
        self._p.emit(VolatileSlotsSeen(self._p.server, facts.advice))
