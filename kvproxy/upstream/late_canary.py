"""Asks for a canary that could not be had as a life of the server began: it was full, busy, or too slow.

Without one a life is trusted with itself alone, and what it saves is of no use to the next. So it is asked
for again while nothing is under way, in a slot that nobody lives in, with more patience than before a first
request, and a few times only. Requests that come meanwhile are served in the other slots; the answer then
counts for nothing, because beside others a server computes something slightly else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvproxy.identifiers import Epoch
from kvproxy.slots.cells import has_room
from kvproxy.slots.leases import Lease
from kvproxy.slots.settling import Settling
from kvproxy.snapshots.canaries import LIFE
from kvproxy.snapshots.canary import Canary
from kvproxy.upstream.acquaintance import CANARY_BODY_BYTES
from kvproxy.upstream.canary import ask_canary
from kvproxy.upstream.facts import Facts, ServerState
from kvproxy.upstream.replies import Unavailable
from kvproxy.upstream.watch import Watch, WatchParts

LOOK_SECONDS = 1.0
FIRST_PAUSE_SECONDS = 5.0
"""Doubled after each attempt that came to nothing."""
MOST_ATTEMPTS = 8
"""In one life: the last is made some 20 minutes after the first."""
PATIENCE_SECONDS = 15.0
"""Nobody waits for it but one for whom no other slot is left."""
CANARY_TOKENS = 64
"""More than its prompt has, where every byte is a token."""


class LateCanary:
    """For the server of `parts`. `erase` empties the slot of a lease that nobody lives in."""

    def __init__(self, parts: WatchParts, watch: Watch, *, erase: Callable[[Lease], Awaitable[None]]) -> None:
        self._p = parts
        self._watch = watch
        self._erase = erase
        self._epoch = Epoch(-1)
        self._attempts = 0
        self._not_before = 0.0

    async def run(self) -> None:
        """Ask where one is missing, for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.run_once()

    async def run_once(self) -> None:
        """Ask, if one is missing, it is time, and nobody is disturbed."""
        if not _is_missing(self._p.standing.facts) or not self._is_time():
            return
        await self._watch.confirm()  # asleep by now, it would wake
        lease = self._take_slot() if _is_missing(self._p.standing.facts) else None
        if lease is None:
            return
        try:
            is_known = await self._ask(lease)
        finally:
            if not lease.is_released:
                lease.release()
        if not is_known:
            self._attempts += 1
            self._not_before = self._p.clock.now() + FIRST_PAUSE_SECONDS * 2**self._attempts

    def _is_time(self) -> bool:
        if self._epoch != self._p.table.epoch:
            self._epoch, self._attempts = self._p.table.epoch, 0
            self._not_before = self._p.clock.now() + FIRST_PAUSE_SECONDS
        return self._attempts < MOST_ATTEMPTS and self._p.clock.now() >= self._not_before

    def _take_slot(self) -> Lease | None:
        if self._p.table.is_volatile and self._p.table.has_dirty:
            return None  # its launch would clear what is not saved
        lease = self._p.desk.try_unused()
        pool = self._p.table.pool
        if lease is None or pool is None or has_room(pool, CANARY_TOKENS, lease.slot, self._p.table.views()):
            return lease
        lease.release()
        return None

    async def _ask(self, lease: Lease) -> bool:
        """Whether it is known now. The slot is as empty afterwards as it can be made."""
        slot, epoch, began = lease.slot, lease.epoch, self._p.clock.now()
        known, props = self._p.standing.facts.fingerprint, self._p.standing.facts.props
        self._p.table.serve(slot, epoch, None)
        answer: Canary | Unavailable | None = None
        try:
            answer = await ask_canary(self._p.client, slot, PATIENCE_SECONDS)
        finally:
            if not isinstance(answer, Canary):
                self._drop(lease)
        if not isinstance(answer, Canary) or lease.is_void or known is None or props is None:
            return False
        was_alone = self._was_alone(lease, began)
        self._p.table.served(slot, epoch, None, tokens=CANARY_TOKENS)
        await self._erase(lease)
        await self._watch.refresh()  # the answer may be another process's
        if not was_alone or epoch != self._p.table.epoch or self._p.desk.is_suspended:
            return False
        self._watch.found_canary(epoch, await self._p.introduction.identify(known, props, answer))
        return True

    def _drop(self, lease: Lease) -> None:
        settling = Settling(lease.slots[0], was_seen=False, body_bytes=CANARY_BODY_BYTES)
        self._p.table.broke_off(lease.slots[0], lease.epoch, settling)
        self._p.look()

    def _was_alone(self, lease: Lease, began: float) -> bool:
        others = (view for view in self._p.table.views() if view.id != lease.slot)
        return not self._p.desk.has_strays and all(v.is_free and v.last_used < began for v in others)


def _is_missing(facts: Facts) -> bool:
    is_awake = facts.state in (ServerState.HEALTHY, ServerState.DEGRADED)
    return is_awake and facts.pins and facts.persistence.is_on and facts.canary.startswith(LIFE)
