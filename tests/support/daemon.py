"""kvproxy as a process of its own, which can be killed, stopped and brought back on the same port."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support.process import POLL_SECONDS, ManagedProcess

START_SECONDS = 20.0
STOP_SECONDS = 40.0

Event = dict[str, Any]


class Kvproxy(ManagedProcess):
    """One `kvproxy serve` at a time, in front of `upstream`.

    `settings` are assignments as for `--set`. `snapshot_dir` None leaves the files to the server.
    """

    def __init__(
        self, upstream: str, state_dir: Path, *settings: str, snapshot_dir: Path | None = None
    ) -> None:
        super().__init__("kvproxy")
        self._upstream = upstream
        self._state_dir = state_dir
        self._snapshot_dir = snapshot_dir
        self._settings = settings

    async def start(self, *, wait_for_server: bool = True) -> None:
        """It is up once it serves and (by default) its server is usable."""
        await self._start("/kvproxy/readyz" if wait_for_server else "/kvproxy/healthz", START_SECONDS)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end (by `number`) and wait; its exit code. Killed, and TimeoutError, if it does not."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                return await self._end(number)
        except TimeoutError:
            await self.kill()
            raise

    def events(self, *names: str) -> list[Event]:
        """The log's events of every life so far, in their order; only those called one of `names`, if any."""
        lines = (line for line in self.log().splitlines() if line.startswith("{") and line.endswith("}"))
        events: list[Event] = [json.loads(line) for line in lines]
        return [event for event in events if not names or event["event"] in names]

    async def until_events(self, name: str, count: int, seconds: float = 5.0) -> list[Event]:
        """The events called `name` once there are `count` of them: the log is written a moment later."""
        async with asyncio.timeout(seconds):
            while len(found := self.events(name)) < count:  # noqa: ASYNC110 - as below
                await asyncio.sleep(POLL_SECONDS)
        return found

    async def until_logged(self, text: str, seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while text not in self.log():  # noqa: ASYNC110 - as below
                await asyncio.sleep(POLL_SECONDS)

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self.get_json("/kvproxy/status")
        return status

    async def slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = (await self.status())["servers"][0]["slots"]
        return slots

    async def session(self, name: str) -> dict[str, Any]:
        """What is known of a session, by the client's own id."""
        session: dict[str, Any] = await self.get_json(f"/kvproxy/sessions/{quote(name, safe='')}")
        return session

    async def flush(self) -> dict[str, Any]:
        """Save everything that is dirty."""
        async with self._session() as session, session.post("/kvproxy/flush") as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer

    async def until_slots(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 15.0) -> None:
        """Wait until `condition` holds of every slot, as the status shows it."""
        async with asyncio.timeout(seconds):
            while not all(condition(slot) for slot in await self.slots()):  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(POLL_SECONDS)

    async def until_saved(self, seconds: float = 15.0) -> None:
        await self.until_slots(lambda slot: not slot["dirty"], seconds)

    def _command(self) -> list[str]:
        directory = ["--snapshot-dir", str(self._snapshot_dir)] if self._snapshot_dir else []
        settings = [word for one in self._settings for word in ("--set", one)]
        where = ["--upstream", self._upstream, "--listen", f"127.0.0.1:{self.port}"]
        log = ["--log-level", "debug", "--log-format", "json"]
        kvproxy = [sys.executable, "-m", "kvproxy", "serve"]
        return [*kvproxy, *where, "--state-dir", str(self._state_dir), *directory, *log, *settings]
