"""A program of our own that tests kill, stop and bring back on the same port."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from scripts import child
from scripts.ports import free_port

POLL_SECONDS = 0.02
ANSWER_SECONDS = 60.0
LOG_TAIL_BYTES = 4_000


class ManagedProcess(ABC):
    """One process at a time, on one port for all its lives; also an async context manager, which kills it.

    `name` is what it is called in complaints. Without `port` a free one is taken. The output of every life
    is kept in one file until nobody holds this object any more.
    """

    def __init__(self, name: str, *, port: int | None = None) -> None:
        self.name = name
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None
        descriptor, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
        os.close(descriptor)
        self._log = Path(path)
        weakref.finalize(self, self._log.unlink)

    @abstractmethod
    def _command(self) -> list[str]:
        """What starts it on `port`."""

    @abstractmethod
    async def start(self) -> None:
        """Start it and wait until it is up; RuntimeError with the log's end if it never is."""

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def kill(self) -> None:
        """End it as a crash would (SIGKILL); nothing happens if it has ended already."""
        await self._end(signal.SIGKILL)

    async def wait(self) -> int:
        """Wait until the process has ended by itself; its exit code, negative for a signal."""
        return await asyncio.to_thread(self._started().wait)

    def log(self) -> str:
        """The output of every life so far."""
        return self._log.read_text(errors="replace")

    async def get_json(self, path: str) -> Any:
        """aiohttp.ClientResponseError where the status is an error."""
        async with self._session() as session, session.get(path) as response:
            response.raise_for_status()
            return await response.json()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.is_running else "not running"
        return f"<{self.name} at {self.base_url}, {state}>"

    async def _start(self, path: str, seconds: float) -> None:
        """Start the process and wait until it answers 200 at `path`."""
        assert not self.is_running, f"start() of a {self.name} that runs"
        with self._log.open("ab") as log:
            # Not asyncio's subprocess: a process may outlive the event loop that started it (wide fixtures).
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=child.die_with_parent(signal.SIGKILL),
            )
        try:
            async with asyncio.timeout(seconds):
                await self._until_up(path)
        except BaseException as error:
            await self.kill()
            if isinstance(error, TimeoutError):
                raise self._failed(f"was not up within {seconds:.0f} s") from error
            raise

    async def _until_up(self, path: str) -> None:
        async with self._session() as session:
            while not await _is_ok(session, path):
                if not self.is_running:
                    raise self._failed(f"ended with code {self._started().returncode}")
                await asyncio.sleep(POLL_SECONDS)

    async def _end(self, number: signal.Signals) -> int:
        """Send it a signal and wait; its exit code, 0 if it was never started."""
        if self._process is None:
            return 0
        self._process.send_signal(number)  # does nothing to a process that has ended
        return await self.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    def _failed(self, what: str) -> RuntimeError:
        return RuntimeError(f"{self.name} {what}; the end of its log:\n{self.log()[-LOG_TAIL_BYTES:]}")

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.base_url, timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS))


async def _is_ok(session: aiohttp.ClientSession, path: str) -> bool:
    try:
        async with session.get(path) as response:
            return response.status == 200
    except aiohttp.ClientError:  # nobody listens yet
        return False
