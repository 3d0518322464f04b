"""kvproxy as a process of its own, which can be killed, stopped and brought back on the same port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from scripts import child
from tests.support.raw import free_port

START_SECONDS = 20.0
STOP_SECONDS = 40.0
POLL_SECONDS = 0.02

Event = dict[str, Any]


class Kvproxy:
    """One `kvproxy serve` at a time, in front of `upstream`; also an async context manager.

    `settings` are assignments as for `--set`. `snapshot_dir` None leaves the files to the server.
    """

    def __init__(
        self, upstream: str, state_dir: Path, *settings: str, snapshot_dir: Path | None = None
    ) -> None:
        self.port = free_port()
        self._upstream = upstream
        self._state_dir = state_dir
        self._snapshot_dir = snapshot_dir
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        descriptor, name = tempfile.mkstemp(prefix="kvproxy-", suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        weakref.finalize(self, self._log.unlink)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "kvproxy was never started"
        return self._process.pid

    async def start(self, *, wait_for_server: bool = True) -> None:
        """Start the process and wait until it serves, and (by default) until its server is usable."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=child.die_with_parent(signal.SIGKILL),
            )
        path = "/kvproxy/readyz" if wait_for_server else "/kvproxy/healthz"
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._answers(path)
        except BaseException as error:
            await self.kill()
            if isinstance(error, TimeoutError):
                raise RuntimeError(f"kvproxy did not start; its log:\n{self.log()[-4000:]}") from error
            raise

    async def kill(self) -> None:
        """End it as a crash would (SIGKILL)."""
        await self._end(signal.SIGKILL)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end (by `number`) and wait; its exit code. Killed, and TimeoutError, if it does not."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                return await self._end(number)
        except TimeoutError:
            await self.kill()
            raise

    def log(self) -> str:
        """The output of every life so far."""
        return self._log.read_text(errors="replace")

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
        return await self._json("GET", "/kvproxy/status")

    async def slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = (await self.status())["servers"][0]["slots"]
        return slots

    async def session(self, name: str) -> dict[str, Any]:
        """What is known of a session, by the client's own id."""
        return await self._json("GET", f"/kvproxy/sessions/{quote(name, safe='')}")

    async def flush(self) -> dict[str, Any]:
        """Save everything that is dirty."""
        return await self._json("POST", "/kvproxy/flush")

    async def until_slots(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 15.0) -> None:
        """Wait until `condition` holds of every slot, as the status shows it."""
        async with asyncio.timeout(seconds):
            while not all(condition(slot) for slot in await self.slots()):  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(POLL_SECONDS)

    async def until_saved(self, seconds: float = 15.0) -> None:
        await self.until_slots(lambda slot: not slot["dirty"], seconds)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    def _command(self) -> list[str]:
        directory = ["--snapshot-dir", str(self._snapshot_dir)] if self._snapshot_dir else []
        settings = [word for one in self._settings for word in ("--set", one)]
        where = ["--upstream", self._upstream, "--listen", f"127.0.0.1:{self.port}"]
        log = ["--log-level", "debug", "--log-format", "json"]
        kvproxy = [sys.executable, "-m", "kvproxy", "serve"]
        return [*kvproxy, *where, "--state-dir", str(self._state_dir), *directory, *log, *settings]

    async def _answers(self, path: str) -> None:
        async with aiohttp.ClientSession(self.base_url) as session:
            while not await _is_ok(session, path):
                assert self._process is not None
                if self._process.poll() is not None:
                    raise RuntimeError(f"kvproxy ended; its log:\n{self.log()[-4000:]}")
                await asyncio.sleep(POLL_SECONDS)

    async def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(number)
        return await asyncio.to_thread(self._process.wait)

    async def _json(self, method: str, path: str) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession(self.base_url) as session,
            session.request(method, path) as response,
        ):
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer


async def _is_ok(session: aiohttp.ClientSession, path: str) -> bool:
    try:
        async with session.get(path) as response:
            return response.status == 200
    except aiohttp.ClientError:  # nobody listens yet
        return False
