"""Gives a slot the form in which it is best saved.

Memory that cannot roll back (recurrent, hybrid, sliding window) goes on from a snapshot only if the next
prompt extends all of it. A client that sends its last reply back in another form (reasoning dropped, tool
calls written anew) never does, so the slot is brought back to where the reply began, which every next request
shares, and saved there. The reply is computed again on the next turn: the price of a small part, paid once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvproxy.boundary.evidence import Evidence, Form, Observation, form_to_use
from kvproxy.boundary.prefix import LEAST_TOKENS, Boundary, find_boundary
from kvproxy.boundary.rewind import NotRewound, rewind
from kvproxy.boundary.turn import Turn
from kvproxy.checkpoint.outcome import Trigger
from kvproxy.checkpoint.parts import Parts
from kvproxy.identifiers import Epoch, SessionKey, SlotId
from kvproxy.sessions.session import Session
from kvproxy.slots.settling import Settling, look
from kvproxy.slots.slot import Occupancy
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream.replies import Unavailable

FIND_SECONDS = 5.0
REWIND_SECONDS = 60.0
SWITCH_REWIND_SECONDS = 5.0
"""On a switch somebody waits: only what is there already is gone back to."""

CONFIRM_SECONDS = 1.25
"""Between looks whether a rewind that was given up has ended; see `upstream.probe`."""

SHAPED_KINDS = (MemoryKind.SLIDING_WINDOW, MemoryKind.HYBRID, MemoryKind.RECURRENT)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the slot holds now: `boundary` if it was brought there."""

    boundary: Boundary | None = None


class Shaper:
    """Of one server. Remembers what its sessions' requests have shown of their clients."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._server = Evidence()
        self._turned: dict[SessionKey, Session] = {}

    @property
    def is_needed(self) -> bool:
        """Whether turns have to be remembered at all: a plain model never pays for any of this."""
        return self._p.standing.facts.kind in SHAPED_KINDS

    def observe(self, session: Session, stay: Occupancy, prompt: int | None, reused: int | None) -> None:
        """A request of `session` met `stay` in its slot and reused so much of it."""
        if not self.is_needed or not stay.tokens or prompt is None or reused is None:
            return
        form = Form.BOUNDARY if stay.is_boundary else Form.PLAIN
        seen = Observation(form, stay.tokens, reused, prompt)
        session.evidence = session.evidence.with_seen(seen)
        self._server = self._server.with_seen(seen)

    def remember(self, session: Session, turn: Turn | None) -> None:
        """The newest turn of `session`. A turn holds a whole request, so of sessions that live in no slot any
        more none is kept."""
        session.turn = turn if self.is_needed else None
        if session.turn is None:
            self._turned.pop(session.key, None)
            return
        self._turned[session.key] = session
        views = self._p.table.views()
        if len(self._turned) <= len(views):
            return
        present = {view.occupant for view in views}
        for key in [key for key in self._turned if key not in present]:
            self._turned.pop(key).turn = None

    async def shape(
        self, slot: SlotId, epoch: Epoch, stay: Occupancy, trigger: Trigger
    ) -> Shape | NotRewound:
        """Bring the slot into the form to save it in. Held by the caller, and free of any request."""
        turn = self._turn_to_undo(stay)
        if turn is None:
            return Shape()
        found = await find_boundary(
            self._p.client,
            turn.asked.document,
            turn.ended,
            label=turn.asked.label,
            prompt_tokens=turn.prompt_tokens,
            timeout=FIND_SECONDS,
        )
        if not isinstance(found, Boundary):
            return Shape()
        if epoch != self._p.table.epoch:
            return NotRewound("the server is another one by now")
        is_switch = trigger is Trigger.SWITCH
        boundary = found.cheap if is_switch else found
        if len(boundary.ids) < LEAST_TOKENS:  # the template shows the history in another way from then on
            return Shape()
        if stay.stump is not None and boundary.kept < stay.stump.tokens:
            return Shape()  # to go back there would be to compute wrongly
        seconds = SWITCH_REWIND_SECONDS if is_switch else REWIND_SECONDS
        done = await rewind(self._p.client, slot, boundary, timeout=seconds)
        if isinstance(done, NotRewound):
            return done
        self._p.table.reshaped(slot, epoch, len(boundary.ids))
        return Shape(boundary)

    def _turn_to_undo(self, stay: Occupancy) -> Turn | None:
        """The turn whose reply is to be taken out of the slot; None to save the slot as it is."""
        session = self._p.registry.find(stay.session)
        if not self.is_needed or session is None or session.turn is None or stay.is_boundary:
            return None
        if session.turn.revision != stay.revision:
            return None
        form = form_to_use(session.evidence, self._server, may_roll_back=False)
        return session.turn if form is Form.BOUNDARY else None

    async def until_idle(self, slot: SlotId, epoch: Epoch, *, though_away: bool = True) -> bool:
        """After a prompt of ours in `slot` that was given up: wait until the server is done with it.

        True once that was seen; False if the slots are others by now, or, unless `though_away`, the server is
        away.

        The dropped prompt may not have been launched yet, as any request (see `slots.settling`).
        """
        settling: Settling | None = Settling(slot, was_seen=False)
        while epoch == self._p.table.epoch and (though_away or self._p.standing.facts.state.has_slots):
            await asyncio.sleep(CONFIRM_SECONDS)
            infos = await self._p.client.slots()
            if not isinstance(infos, Unavailable) and settling is not None:
                settling = look(settling, infos, self._p.clock.now())
            if settling is None:
                return epoch == self._p.table.epoch
        return False
