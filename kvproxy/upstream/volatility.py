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
from kvproxy.upstream.replies import SlotInfo, Unavailable


class Volatility:
    """`on_proof` is called when a slot was found cleared, `on_look` with what each look showed and when, in
    the clock's seconds, it was asked for."""

    def __init__(
        self,
        client: LlamaServer,
        table: SlotTable,
        tasks: TaskSet,
        clock: Clock,
        *,
        on_proof: Callable[[], None],
        on_look: Callable[[Sequence[SlotInfo], float], None],
    ) -> None:
        self._clock = clock
        self._on_look = on_look
        self._client = client
        self._table = table
        self._tasks = tasks
        self._on_proof = on_proof
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
        held = {info.id: info for info in infos}
        verdicts = [_is_cleared(held.get(v.id)) for v in witnesses if self._table.view(v.id) == v]
        if any(verdict is not None for verdict in verdicts):
            self._decided_in = epoch
        if any(verdicts):
            self._on_proof()


def _is_witness(view: SlotView, began: float) -> bool:
    """It was left alone since before the request, and its last answer said what it holds."""
    is_quiet = view.state is SlotState.RESIDENT and not view.is_leased and view.last_used < began
    return is_quiet and view.occupancy is not None and bool(view.occupancy.tokens)


def _is_cleared(info: SlotInfo | None) -> bool | None:
    """None where the server does not tell, as for a slot that was restored and not used since."""
    if info is None or info.n_prompt_tokens is None:
        return None
    return info.n_prompt_tokens == 0
