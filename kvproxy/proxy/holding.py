"""Holding a lease for a request: taken from a server that is still the same, given back once and told."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from kvproxy.errors import UpstreamError
from kvproxy.identifiers import ServerName, SlotId, short
from kvproxy.proxy.vigil import Vigil
from kvproxy.proxy.visit import Visit
from kvproxy.slots.leases import Lease, LeaseDesk, Want
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Emit, SlotAcquired, SlotReleased
from kvproxy.upstream.facts import Facts, why_without_slots
from kvproxy.upstream.watch import Watch

T = TypeVar("T")


def require_slots(watch: Watch, facts: Facts) -> None:
    """Raises UpstreamError (503) for a server whose slots cannot be used now."""
    if not facts.state.has_slots:
        message = why_without_slots(watch.url, facts)
        raise UpstreamError(message, status=503, retry_after_seconds=1, was_sent=False)


@dataclass(frozen=True, slots=True)
class Holder:
    server: ServerName
    desk: LeaseDesk
    watch: Watch
    tasks: TaskSet
    emit: Emit

    async def acquire(self, want: Want, visit: Visit) -> Lease | None:
        """A lease on a server that was asked, after any wait, whether it is still the same; None if it is
        not, and the request has to begin again."""
        visit.account.asks()
        lease = await self.desk.acquire(want, visit.vigil.waits)
        try:
            facts = await self.watch.confirm()
            require_slots(self.watch, facts)
        except BaseException:
            lease.release()
            raise
        if lease.is_void or not facts.pins:
            lease.release()
            return None
        self.emit(SlotAcquired(self.server, *_named(lease), want.purpose, lease.waited_seconds))
        return lease

    async def depart(self, lease: Lease, vigil: Vigil) -> None:
        """Wait until the request of `lease` may be sent, with the very next step. If the client leaves
        meanwhile, the lease is given back."""
        try:
            await self.desk.depart(lease, vigil.waits)
        except BaseException:
            self.release(lease)
            raise

    def release(self, lease: Lease) -> None:
        named = _named(lease)
        lease.release()
        self.emit(SlotReleased(self.server, *named, lease.want.purpose))

    async def see_through(self, lease: Lease, vigil: Vigil, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` under `lease`. If it fails, or the client leaves and it is finished all the same, the
        lease is given back here."""
        vigil.waits()
        task = self.tasks.spawn(work, name="prepare a slot")
        try:
            return await asyncio.shield(task)
        except BaseException:
            task.add_done_callback(lambda _: self.release(lease))
            raise


def _named(lease: Lease) -> tuple[SlotId | None, str | None]:
    """A lease's slot and session as events name them."""
    slot = lease.slots[0] if len(lease.slots) == 1 else None
    return slot, short(lease.want.session) if lease.want.session else None
