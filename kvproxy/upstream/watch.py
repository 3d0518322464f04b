"""Notices that the server is not what it was: another process, asleep, loading, gone.

An *epoch* is one life of the server's slots. It ends when `/props` shows another process (a new marker), or
the server slept (its slots are empty then, though the process is the same). Everything believed of slots
dies with it. A break of the sentinel's connection proves nothing by itself, so grants stop until `/props`
was asked; where the build has no marker that tells lives apart, such a break counts as a new life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvproxy.clock import Clock
from kvproxy.errors import ErrorCode, UpstreamError
from kvproxy.identifiers import Epoch, ServerName, SlotId
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.slots.leases import LeaseDesk
from kvproxy.slots.settling import Settling
from kvproxy.slots.state import SlotState
from kvproxy.slots.table import SlotTable
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Emit, ServerReady, ServerUnavailable, VolatileSlotsSeen, Warned
from kvproxy.upstream.acquaintance import ANSWER_SECONDS, Acquaintance, Introduction, Leftover
from kvproxy.upstream.client import Action, LlamaServer
from kvproxy.upstream.facts import (
    KEY_ADVICE,
    NO_SLOTS_ADVICE,
    VOLATILE_ADVICE,
    Facts,
    Persistence,
    PersistenceMode,
    ServerState,
    Standing,
    cannot_be_reached,
)
from kvproxy.upstream.replies import Erased, Obstacle, Props, SlotInfo, Unavailable

FRESH_SECONDS = 1.0
"""A request after more than this of silence asks `/props` before it trusts a slot."""

PERIOD_SECONDS = 2.0
PERIOD_WITHOUT_SERVER_SECONDS = 0.5

CANARY_BODY_BYTES = 512
"""At least as much as asks for a canary."""

_STATES = {
    Obstacle.LOADING: ServerState.LOADING,
    Obstacle.UNREACHABLE: ServerState.UNREACHABLE,
}

_UNSUPPORTED = ErrorCode.BACKEND_UNSUPPORTED

_HIDDEN = (Obstacle.UNSUPPORTED, Obstacle.UNAUTHORIZED, Obstacle.NOT_LLAMA_SERVER)
"""Why `/slots` will not be seen in this life. Any other trouble passes."""


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
    readopt: Callable[[Props, tuple[SlotInfo, ...]], None] = lambda props, slots: None
    """Called at the first look at the slots since kvproxy started."""
    clears_idle_slots: Callable[[Sequence[SlotInfo]], Awaitable[bool | None]] = _not_known
    """Tries out, while nothing is granted, whether a request in one slot empties another."""
    honours_messages_pin: Callable[[Sequence[SlotInfo]], Awaitable[bool | None]] = _not_known
    """Tries out likewise whether `/v1/messages` runs in the slot that it names."""


class Watch:
    """The one who decides which epoch it is."""

    def __init__(self, parts: WatchParts) -> None:
        self._p = parts
        self._suspicions = 0
        self._is_suspect = False
        self._lines = 0
        self._known_line = 0
        """The line, counted, since which the server told who it is."""
        self._asking: asyncio.Task[None] | None = None
        self._confirmed_at = float("-inf")
        self._wake = asyncio.Event()
        self._lives = 0
        self._warned_of_others = False
        self._is_changed = False

    @property
    def url(self) -> str:
        """The server's address, for messages."""
        return self._p.client.base_url

    async def run(self) -> None:
        """Ask now and then, for ever."""
        while True:
            self._wake.clear()  # before the question: a doubt that comes with its answer wants another one
            await self.refresh()
            has_slots = self._p.standing.facts.state.has_slots
            period = PERIOD_SECONDS if has_slots else PERIOD_WITHOUT_SERVER_SECONDS
            try:
                async with asyncio.timeout(period):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def suspect(self) -> None:
        """Something broke: no slot is granted until the server was asked who it is."""
        self._suspicions += 1
        self._is_suspect = True
        self._p.desk.suspend()
        self._wake.set()

    def renew(self) -> None:
        """The server may compute something else from now on, as with other adapters: meet it anew."""
        self._is_changed = True
        self.suspect()

    def nudge(self) -> None:
        """There is a line where there was none, perhaps to another server: ask now."""
        self._lines += 1
        self._wake.set()

    async def confirm(self) -> Facts:
        """The facts, not older than `FRESH_SECONDS`: at once where they are fresh, and the line stood."""
        is_fresh = self._p.clock.now() - self._confirmed_at <= FRESH_SECONDS
        if not is_fresh or self._is_doubtful or not self._p.standing.facts.state.has_slots:
            was_asked_before = self._asking is not None and not self._asking.done()
            await self.refresh()
            if was_asked_before and self._is_doubtful:
                await self.refresh()
        return self._p.standing.facts

    def confirmed(self) -> None:
        """An answer of the server went by: it is there, and awake. Spares the next request a question."""
        if not self._is_doubtful:
            self._confirmed_at = self._p.clock.now()

    @property
    def _is_doubtful(self) -> bool:
        # Without a line a whole life of the server may pass unseen.
        return self._is_suspect or self._known_line != self._lines or not self._p.line_stands()

    async def refresh(self) -> None:
        """Ask the server who it is; joins a question under way."""
        if self._asking is None or self._asking.done():
            self._asking = self._p.tasks.spawn(self._ask(), name="ask the server")
        await asyncio.shield(self._asking)

    async def emptied(self) -> None:
        """A slot that should have held tokens held none: a sleep, another process, or volatile slots."""
        epoch, began = self._p.table.epoch, self._p.clock.now()
        await self.refresh()
        has_answered = self._confirmed_at >= began
        if has_answered and epoch == self._p.table.epoch:
            self.found_volatile()

    # -- inside --------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        """Ask until nothing happened between the question and the end of dealing with its answer."""
        while True:
            suspicions, line = self._suspicions, self._lines
            began = self._p.clock.now()
            answer = await self._p.client.props(ANSWER_SECONDS)
            if suspicions == self._suspicions and await self._take(answer, began, suspicions):
                if not isinstance(answer, Unavailable):
                    self._known_line = line
                return

    async def _take(self, answer: Props | Unavailable, began: float, suspicions: int) -> bool:
        if isinstance(answer, Unavailable):
            self._unavailable(answer)
            return True
        if self._is_same(answer):
            self._still_there(answer)
        elif not await self._begin_epoch(answer, suspicions):
            return False
        self._confirmed_at = began
        return True

    def _is_same(self, props: Props) -> bool:
        known = self._p.standing.facts.props
        if known is None or known.identity != props.identity or self._is_changed:
            return False
        if self._is_suspect and not props.has_marker:
            return False
        if not props.is_sleeping and self._p.standing.facts.persistence.mode is PersistenceMode.UNKNOWN:
            return False  # first met asleep: now it can be asked what it allows
        return known.is_sleeping or not props.is_sleeping

    def _still_there(self, props: Props) -> None:
        facts = self._p.standing.facts
        if not facts.state.has_slots or facts.props != props:
            self._p.standing.set(props=props, **_as_is(replace(facts, props=props)))
        self._is_suspect = False
        if self._p.standing.facts.pins:
            self._p.desk.resume()

    def _unavailable(self, answer: Unavailable) -> None:
        is_slow = answer.reason is Obstacle.UNREACHABLE and self._p.line_stands()
        if is_slow and not self._is_suspect and self._p.standing.facts.state.has_slots:
            return
        state = _STATES.get(answer.reason, ServerState.DEGRADED)
        reason = KEY_ADVICE if answer.reason is Obstacle.UNAUTHORIZED else answer.message
        changed = self._p.standing.facts.state is not state
        if state is ServerState.DEGRADED:
            # It serves, but does not tell who it is: once it does, that is a life to take up anew.
            self._p.standing.set(state=state, reason=reason, props=None, pins=False)
        else:
            self._p.standing.set(state=state, reason=reason)
        self._p.desk.suspend()
        if state is not ServerState.LOADING:
            is_gone = state is ServerState.UNREACHABLE
            message = (
                cannot_be_reached(self.url, reason) if is_gone else f"llama-server cannot be used: {reason}"
            )
            self._p.desk.refuse(UpstreamError(message, status=503, retry_after_seconds=1))
        if changed:
            self._p.emit(ServerUnavailable(self._p.server, state, reason))

    async def _begin_epoch(self, props: Props, suspicions: int) -> bool:
        """Take up a new life of the server; False if doubt arose meanwhile."""
        known = self._p.standing.facts
        has_slept = props.is_sleeping and known.props is not None and known.props.identity == props.identity
        self._p.desk.suspend()
        self._p.registry.lost(v.occupant for v in self._p.table.views() if v.occupant)
        epoch = self._p.table.begin_epoch(props.total_slots)
        self._p.desk.epoch_began()
        self._p.process_changed()
        met = await self._p.introduction.meet(props, self._p.standing.facts)
        is_volatile = (has_slept and known.is_volatile) or await self._tries(self._p.clears_idle_slots, met)
        pins_messages = not is_volatile and await self._tries(self._p.honours_messages_pin, met)
        if suspicions != self._suspicions or epoch != self._p.table.epoch:
            return False
        self._is_suspect = self._is_changed = False
        if self._p.standing.obstacle:
            met = replace(met, persistence=Persistence(PersistenceMode.OFF, self._p.standing.obstacle))
        self._p.standing.facts = replace(_facts(props, met), pins_messages=pins_messages)
        self._lives += 1
        mode, is_restart = met.persistence.mode, self._lives > 1
        self._p.emit(ServerReady(self._p.server, epoch, props.total_slots, props.build, mode, is_restart))
        self._admit(props, met.slots)
        if met.leftover is not None:
            self._settle(met.leftover, epoch)
        if is_volatile:
            self.found_volatile()
        if self._p.standing.facts.pins:
            self._p.desk.resume()
            self._p.look()
        return True

    async def _tries(
        self, trial: Callable[[Sequence[SlotInfo]], Awaitable[bool | None]], met: Acquaintance
    ) -> bool:
        """Whether `trial` proved its point, made where nobody else can be in its way."""
        is_quiet = met.leftover is None and not self._p.desk.has_strays
        if isinstance(met.slots, Unavailable) or not is_quiet or not met.persistence.is_on:
            return False  # nor can slots be emptied again where there are no slot actions
        return bool(await trial(met.slots))

    def _settle(self, leftover: Leftover, epoch: Epoch) -> None:
        """Grant the slot of a canary that did not end in time once nothing of it can come any more."""
        slot = leftover.slot
        if self._p.table.view(slot).state is not SlotState.IDLE:
            return  # something runs in it: it is granted when that is seen to be over
        if leftover.erase is not None:
            self._p.table.doubt(slot, epoch)
            self._p.tasks.spawn(self._await_erase(slot, epoch, leftover.erase), name="late erase")
            return
        self._p.table.serve(slot, epoch, None)
        self._p.table.broke_off(slot, epoch, Settling(slot, was_seen=False, body_bytes=CANARY_BODY_BYTES))
        self._p.look()

    async def _await_erase(self, slot: SlotId, epoch: Epoch, erase: Action[Erased]) -> None:
        await erase.fate()
        self._p.table.fate_known(slot, epoch)
        self._p.desk.changed()

    def _admit(self, props: Props, slots: tuple[SlotInfo, ...] | Unavailable) -> None:
        if isinstance(slots, Unavailable) and slots.reason in _HIDDEN:
            reason = KEY_ADVICE if slots.reason is Obstacle.UNAUTHORIZED else NO_SLOTS_ADVICE
            off = Persistence(PersistenceMode.OFF, reason)
            self._p.standing.set(state=ServerState.DEGRADED, reason=reason, persistence=off, pins=False)
            return
        if props.is_sleeping:
            self._p.table.assume_blank()
        elif not isinstance(
            slots, Unavailable
        ):  # else a batch of somebody's runs: looked at until it is over
            self._p.table.seen(slots)
        if self._lives == 1:
            self._p.readopt(props, () if isinstance(slots, Unavailable) else slots)

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
        self._p.emit(Warned(f"{what} until the server is started again: {reason}", _UNSUPPORTED))

    def found_volatile(self) -> None:
        """The server was seen to clear idle slots: save each answer and launch one request at a time; where
        nothing can be saved, leave the choice of slots to it."""
        facts = self._p.standing.facts
        if facts.is_volatile:
            return
        if facts.persistence.is_on:
            facts = replace(facts, is_volatile=True)
            self._p.table.found_volatile()
        else:
            off = Persistence(PersistenceMode.OFF, VOLATILE_ADVICE)
            facts = replace(facts, is_volatile=True, persistence=off, pins=False)
            self._p.desk.stop_pinning()
        self._p.standing.set(
            is_volatile=True, persistence=facts.persistence, pins=facts.pins, **_as_is(facts)
        )
        self._p.emit(VolatileSlotsSeen(self._p.server, facts.advice))


def _facts(props: Props, met: Acquaintance) -> Facts:
    facts = Facts(
        props=props,
        fingerprint=met.fingerprint,
        persistence=met.persistence,
        kind=met.kind,
        canary=met.canary,
    )
    return replace(facts, **_as_is(facts))


def _as_is(facts: Facts) -> dict[str, Any]:
    """The state of a server that answers, and the reason for it."""
    if facts.props is not None and facts.props.is_sleeping:
        return {"state": ServerState.SLEEPING, "reason": ""}
    is_off = facts.persistence.mode is PersistenceMode.OFF
    state = ServerState.DEGRADED if is_off or facts.is_volatile else ServerState.HEALTHY
    return {"state": state, "reason": facts.advice}
