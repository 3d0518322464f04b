"""The life of a kvproxy: started, drained, stopped."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvproxy.checkpoint.outcome import Trigger
from kvproxy.checkpoint.rounds import Endings, Flushed
from kvproxy.errors import CapacityError, ErrorCode
from kvproxy.house import House

LAST_LOOK_SECONDS = 1.0
"""For a last look at slots that live on; a server that is too busy for it leaves them to be restored."""


class Runtime(House):
    """A running kvproxy, less its listener."""

    async def start(self) -> None:
        """Raises StateDirTaken if another kvproxy uses the state directory. One that cannot be used only
        means that nothing is saved; an absent server is no error."""
        await self.sorter.load()
        await self.inspection.run_once()
        await self.living.load()
        self.tasks.keep(self.sentinel.run, name="sentinel")
        self.tasks.keep(self.watch.run, name="watch")
        self.tasks.keep(self.probe.run, name="probe")
        self.tasks.keep(self.rounds.run, name="rounds")
        self.tasks.keep(self.keeper.run, name="keeper")
        self.tasks.keep(self.living.run, name="living slots")
        self.tasks.keep(self.late_canary.run, name="late canary")
        self.tasks.keep(self.inspection.run, name="inspection")
        self.is_started = True

    async def drain(self, budget_seconds: float) -> Flushed:
        """Take nothing new, let what runs finish, save what is dirty: all within the budget.

        Idle slots are saved first: their time is not worth waiting for. A fifth of the budget is kept for
        what the last answers leave behind.
        """
        until = self.clock.now() + budget_seconds
        self.is_draining = True
        self.desk.refuse(CapacityError(ErrorCode.DRAINING, "kvproxy is shutting down", retry_after_seconds=5))
        endings: Endings = {}
        await self._flush(budget_seconds * 0.8, endings)
        reserve = budget_seconds / 5 if self.settings.checkpoint.on_shutdown else 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - self.clock.now() - reserve)):
                await self.face.until_idle()
                await self.desk.until_all_returned()
        await self._flush(max(0.0, until - self.clock.now()), endings)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - self.clock.now())):
                await self.rounds.until_all_published()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_LOOK_SECONDS):
                await self.living.keep()
        self.is_ending = True
        return self.rounds.reckon(endings) if self.settings.checkpoint.on_shutdown else Flushed()

    async def stop(self) -> None:
        """End every task and connection. What is not saved is lost, and costs a cold prompt."""
        self.sentinel.close()
        await self.tasks.cancel()
        await self.living.write()
        self._warn(await self.memory.write())
        await self.client.close()
        await self.transport.close()
        await self.store.close()

    async def _flush(self, seconds: float, endings: Endings) -> None:
        if self.settings.checkpoint.on_shutdown:
            await self.rounds.flush(Trigger.SHUTDOWN, seconds, wait_for_requests=False, endings=endings)
