"""Notices that the server is not what it was: another process, asleep, loading, gone.

An *epoch* is one life of the server's slots. It ends when `/props` shows another process (a new marker), or
the server slept (its slots are empty then, though the process is the same). Everything believed of slots
dies with it. A break of the sentinel's connection proves nothing by itself, so grants stop until `/props`
was asked; where the build has no marker that tells lives apart, such a break counts as a new life.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvproxy.errors import UpstreamError
from kvproxy.identifiers import Epoch, SlotId
from kvproxy.slots.settling import Settling
from kvproxy.slots.state import SlotState
from kvproxy.telemetry.events import (
    ServerReady,
    ServerUnavailable,
)
from kvproxy.upstream.acquaintance import (
    ANSWER_SECONDS,
    CANARY_BODY_BYTES,
    Acquaintance,
    Leftover,
)
from kvproxy.upstream.client import Action
from kvproxy.upstream.facts import (
    KEY_ADVICE,
    NO_SLOTS_ADVICE,
    NOT_ASKED,
    START_ADVICE,
    Facts,
    Persistence,
    PersistenceMode,
    ServerState,
    cannot_be_reached,
)
from kvproxy.upstream.findings import Findings, WatchParts
from kvproxy.upstream.replies import Erased, Obstacle, Props, SlotInfo, Unavailable
from kvproxy.upstream.trial import NOTHING_SEEN, Trial

FRESH_SECONDS = 1.0
"""A request after more than this of silence asks `/props` before it trusts a slot. A server falls asleep a
whole number of seconds after its last answer, so up to here it is awake."""

ASKED_SECONDS = 0.1
"""How long an answer of `/props` stands for the request that asked. It does not keep the server awake."""

SETTLED_SECONDS = 5.0
"""How long a new life waits for the calls that were made of the one before. A dead process ends them at once;
only one that goes on under the same address can keep them."""

PERIOD_SECONDS = 2.0
PERIOD_WITHOUT_SERVER_SECONDS = 0.5

_STATES = {
    Obstacle.LOADING: ServerState.LOADING,
    Obstacle.UNREACHABLE: ServerState.UNREACHABLE,
}

_HIDDEN = (Obstacle.UNSUPPORTED, Obstacle.UNAUTHORIZED, Obstacle.NOT_LLAMA_SERVER)
"""Why `/slots` will not be seen in this life. Any other trouble passes."""


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
        self._fresh_until = float("-inf")
        self._wake = asyncio.Event()
        self._lives = 0
        self._is_changed = False
        self._emptied: SlotId | None = None
        self.findings = Findings(parts)

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
        """The server may compute something else from now on, as with other adapters, or its slots are new."""
        self._is_changed = True
        self.suspect()

    def nudge(self) -> None:
        """There is a line where there was none, perhaps to another server: ask now."""
        self._lines += 1
        self._wake.set()

    async def confirm(self) -> Facts:
        """The facts as they are: at once where the server just answered, or runs something for us.

        What the periodic question showed says nothing of now: the server may have fallen asleep since.
        """
        if not self._is_awake or self._is_doubtful or not self._p.standing.facts.state.has_slots:
            was_asked_before = self._asking is not None and not self._asking.done()
            await self.refresh()
            if was_asked_before and self._is_doubtful:
                await self.refresh()
            self._fresh_until = max(self._fresh_until, self._confirmed_at + ASKED_SECONDS)
        return self._p.standing.facts

    @property
    def _is_awake(self) -> bool:
        if self._p.clock.now() <= self._fresh_until:
            return True
        return any(v.state is SlotState.SERVING and v.is_underway for v in self._p.table.views())

    def confirmed(self) -> None:
        """An answer of the server went by: it is there, and awake. Spares the next request a question."""
        if not self._is_doubtful:
            self._fresh_until = self._p.clock.now() + FRESH_SECONDS

    @property
    def _is_doubtful(self) -> bool:
        # Without a line a whole life of the server may pass unseen.
        return self._is_suspect or self._known_line != self._lines or not self._p.line_stands()

    async def refresh(self) -> None:
        """Ask the server who it is; joins a question under way."""
        if self._asking is None or self._asking.done():
            self._asking = self._p.tasks.spawn(self._ask(), name="ask the server")
        await asyncio.shield(self._asking)

    def emptied(self, slot: SlotId) -> None:
        """A slot that an answer had filled held nothing: another process, a sleep, or volatile slots. Nothing
        is granted until it is known which."""
        self._emptied = slot
        self.suspect()

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
        is_same = self._is_same(answer) and not await self._slept_unseen()
        if suspicions != self._suspicions:
            return False
        if is_same:
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
        return not props.is_sleeping or (known.is_sleeping and not self._has_woken)

    @property
    def _has_woken(self) -> bool:
        """Whether a server last seen asleep has answered a request since."""
        return any(view.is_free and view.occupancy is not None for view in self._p.table.views())

    async def _slept_unseen(self) -> bool:
        """Whether a slot was found empty because the server slept, and our own save woke it.

        `/props` does not show it, but then the slots are new; one only cleared still tells its last task.
        """
        if (slot := self._emptied) is None:
            return False
        infos = await self._p.client.slots()
        if not isinstance(infos, Unavailable) and any(i.id == slot and i.id_task is None for i in infos):
            return True
        self._emptied = None
        self.findings.found_volatile()
        return False

    def _still_there(self, props: Props) -> None:
        facts = self._p.standing.facts
        if not facts.state.has_slots or facts.props != props:
            self._p.standing.set(props=props, **replace(facts, props=props).as_is())
        self._is_suspect = False
        if self._p.standing.facts.pins:
            self._p.desk.resume()

    def _unavailable(self, answer: Unavailable) -> None:
        is_slow = answer.reason is Obstacle.UNREACHABLE and self._p.line_stands()
        if is_slow and not self._is_suspect and self._p.standing.facts.state.has_slots:
            return
        state = _STATES.get(answer.reason, ServerState.DEGRADED)
        reason = KEY_ADVICE if answer.reason is Obstacle.UNAUTHORIZED else answer.message
        known = self._p.standing.facts
        is_news = known.state is not state or known.reason == NOT_ASKED
        if state is ServerState.DEGRADED:
            # It serves, but does not tell who it is: once it does, that is a life to take up anew.
            self._p.standing.set(state=state, reason=reason, props=None, pins=False)
        else:
            self._p.standing.set(state=state, reason=reason)
        self._p.desk.suspend()
        absence = cannot_be_reached(self.url, reason) if state is ServerState.UNREACHABLE else ""
        if state is not ServerState.LOADING:
            message = absence or f"llama-server cannot be used: {reason}"
            self._p.desk.refuse(UpstreamError(message, status=503, retry_after_seconds=1))
        if is_news:
            told = f"{absence}; {START_ADVICE}" if absence else reason
            self._p.emit(ServerUnavailable(self._p.server, state, told))

    async def _begin_epoch(self, props: Props, suspicions: int) -> bool:
        """Take up a new life of the server; False if doubt arose meanwhile."""
        known = self._p.standing.facts
        has_slept = props.is_sleeping and known.props is not None and known.props.identity == props.identity
        self._emptied = None
        self._p.desk.suspend()
        self._p.registry.lost(v.occupant for v in self._p.table.views() if v.occupant)
        epoch = self._p.table.begin_epoch(props.total_slots)
        self._p.desk.epoch_began()
        self._p.process_changed()
        await self._p.client.settled(SETTLED_SECONDS)
        met = await self._meet(props)
        if has_slept:
            trial = self._known_of(known)
        elif met.is_volatile:
            trial = Trial(clears=True)
        else:
            trial = await self._try_out(met)
            # What was tried may have gone unanswered, and still be under way.
            met = replace(met, slots=await self._p.client.slots())
        self.findings.trial = trial
        if suspicions != self._suspicions or epoch != self._p.table.epoch:
            return False
        self._is_suspect = self._is_changed = False
        if self._p.standing.obstacle:
            met = replace(met, persistence=Persistence(PersistenceMode.OFF, self._p.standing.obstacle))
        self._p.standing.facts = replace(_facts(props, met), pins_messages=bool(trial.pins_messages))
        self._lives += 1
        mode, is_restart = met.persistence.mode, self._lives > 1
        self._p.emit(ServerReady(self._p.server, epoch, props.total_slots, props.build, mode, is_restart))
        self._admit(props, met.slots)
        if met.leftover is not None:
            self._settle(met.leftover, epoch)
        if trial.shares is not None:
            self.findings.found_shared(epoch, trial.shares)
        if trial.clears:
            self.findings.found_volatile()
        if self._p.standing.facts.pins:
            self._p.desk.resume()
            self._p.look()
        return True

    async def _meet(self, props: Props) -> Acquaintance:
        """What kept us from keeping anything as the question was put may be gone with its answer."""
        was_obstructed = bool(self._p.standing.obstacle)
        met = await self._p.introduction.meet(props, self._p.standing.facts)
        if not was_obstructed or self._p.standing.obstacle:
            return met
        if props.is_sleeping:  # to ask would wake it
            return replace(met, persistence=Persistence(PersistenceMode.UNKNOWN, "the server sleeps"))
        return replace(met, persistence=await self._p.introduction.find_persistence())

    def _known_of(self, known: Facts) -> Trial:
        """Of a process that only slept: what was tried out, and what showed itself since."""
        clears = known.is_volatile or self.findings.trial.clears
        return Trial(clears, known.shares_memory, known.pins_messages)

    async def _try_out(self, met: Acquaintance) -> Trial:
        """Made where nobody else can be in its way, and where slots can be emptied again."""
        is_quiet = met.leftover is None and not self._p.desk.has_strays
        if isinstance(met.slots, Unavailable) or not met.persistence.is_on or not is_quiet:
            return NOTHING_SEEN
        trial = await self._p.try_out(met.slots)
        if trial.clears:
            return trial
        return replace(trial, pins_messages=await self._p.honours_messages_pin(met.slots))

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


def _facts(props: Props, met: Acquaintance) -> Facts:
    facts = Facts(
        props=props,
        fingerprint=met.fingerprint,
        persistence=met.persistence,
        kind=met.kind,
        window=met.window,
        canary=met.canary,
    )
    return replace(facts, **facts.as_is())
