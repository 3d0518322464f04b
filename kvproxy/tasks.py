"""Background tasks with a name, an owner and an end.

asyncio keeps only a weak reference to a task and swallows the exception of one that nobody awaits; a
`TaskSet` keeps the task, and tells its owner when one dies of anything but its own end or a cancel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Failure = Callable[[str, BaseException], None]
"""Called with the task's name and what it died of."""


FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
"""Before a task that is kept begins anew: doubled each time, or a bug that stays would flood the log."""


class TaskSet:
    """The tasks of one owner. `on_failure` hears of each that raised."""

    def __init__(self, on_failure: Failure) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, Any]], *, name: str) -> asyncio.Task[Any]:
        """A task for all its owner's life: after an exception, which the owner hears of, it begins anew."""
        return self.spawn(self._kept(work, name), name=name)

    async def _kept(self, work: Callable[[], Coroutine[Any, Any, Any]], name: str) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await work()
                return
            except Exception as error:  # a bug: without the task, all that it looks after would be lost
                self._on_failure(name, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(task.get_name(), error)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for all that run now; True if all ended within `timeout` seconds."""
        if not self._tasks:
            return True
        _, pending = await asyncio.wait(set(self._tasks), timeout=timeout)
        return not pending

    async def cancel(self) -> None:
        """Cancel all and wait until each has ended."""
        running = set(self._tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        return f"<TaskSet {sorted(t.get_name() for t in self._tasks)}>"
