"""Finds out, once in each life of the server, whether it clears idle slots when another one starts.

With llama-server's defaults (unified KV, idle slots moved to the RAM cache) it does: a slot that we believe
resident is empty as soon as another slot gets a request, and no answer says so. The proof is cheap: after a
request in one slot, look whether another that should hold tokens still does.

Where all slots are idle and empty, as after a start, that is tried out before anybody is served (`trial`).
Else the first requests that show it are the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvproxy.clock import Clock
from kvproxy.identifiers import Epoch, SlotId
from kvproxy.slots.slot import SlotView
from kvproxy.slots.state import SlotState
from kvproxy.slots.table import SlotTable
from kvproxy.tasks import TaskSet
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.facts import Standing
from kvproxy.upstream.replies import SlotInfo, Unavailable


class Volatility:
    """`on_proof` is called when a slot was found cleared, `on_crowd` when that was for want of room in a
    memory that all slots share, `on_look` with what each look showed and when, in the clock's seconds, it was
    asked for."""

    def __init__(
        self,
        client: LlamaServer,
        table: SlotTable,
        standing: Standing,
        tasks: TaskSet,
        clock: Clock,
        *,
        on_proof: Callable[[], None],
        on_crowd: Callable[[Epoch, bool], None],
        on_look: Callable[[Sequence[SlotInfo], float], None],
    ) -> None:
        self._clock = clock
        self._on_look = on_look
        self._client = client
        self._table = table
        self._standing = standing
        self._tasks = tasks
        self._on_proof = on_proof
        self._on_crowd = on_crowd
        self._decided_in: Epoch | None = None
        self._is_looking = False

    def request_ended(self, slot: SlotId, began: float) -> None:
        """A request that began at `began` (monotonic seconds) ran in `slot`."""
        if self._decided_in == self._table.epoch or self._is_looking:
            return
        witnesses = tuple(v for v in self._table.views() if v.id != slot and _is_witness(v, began))
        if witnesses:
            self._is_looking = True
            self._tasks.spawn(self._look(witnesses, self._table.epoch), name="look for cleared slots")

    async def _look(self, witnesses: tuple[SlotView, ...], epoch: Epoch) -> None:
        asked_at = self._clock.now()
        try:
            infos = await self._client.slots()
        finally:
            self._is_looking = False
        if isinstance(infos, Unavailable) or epoch != self._table.epoch:
            return
        self._on_look(infos, asked_at)
        verdicts = self._conclude([v for v in witnesses if self._table.view(v.id) == v], infos)
        if any(verdict is not None for verdict in verdicts) and not self._is_crowd():
            self._decided_in = epoch

    def judge(self, infos: Sequence[SlotInfo], asked_at: float) -> None:
        """Draw the conclusions of a look that was made for another reason and began at `asked_at`."""
        self._conclude([view for view in self._table.views() if _is_witness(view, asked_at)], infos)

    def _conclude(self, witnesses: Sequence[SlotView], infos: Sequence[SlotInfo]) -> list[bool | None]:
        held = {info.id: info for info in infos}
        verdicts = [_is_cleared(held.get(view.id)) for view in witnesses]
        if any(verdicts) and self._is_crowd():
            self._on_crowd(self._table.epoch, True)
        elif any(verdicts):
            self._on_proof()
        return verdicts

    def _is_crowd(self) -> bool:
        """Whether all that is believed to be in the slots is more than one of them may hold."""
        n_ctx = self._standing.facts.n_ctx
        return n_ctx is not None and sum(view.cells for view in self._table.views()) > n_ctx


def _is_witness(view: SlotView, began: float) -> bool:
    """It was left alone since before the request, and its last answer said what it holds."""
    is_quiet = view.state is SlotState.RESIDENT and not view.is_leased and view.last_used < began
    return is_quiet and view.occupancy is not None and bool(view.occupancy.tokens)


def _is_cleared(info: SlotInfo | None) -> bool | None:
    """None where the server does not tell, as for a slot that was restored and not used since."""
    if info is None or info.n_prompt_tokens is None:
        return None
    return info.n_prompt_tokens == 0
