"""A real llama-server for tests, which can be killed and brought back on the same port."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import tempfile
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from scripts import child, llama_server

START_SECONDS = 60.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.02
LOG_TAIL_BYTES = 4_000
DEFAULT_FLAGS = ("--host", "127.0.0.1", "--no-warmup", "-t", "1", "--metrics", "--slots")


class LlamaServer:
    """One llama-server process at a time, on one port for all its lives; also an async context manager.

    `flags` come after the defaults and win over them. Without `slot_dir` slots cannot be saved. Without
    `model` it is a router of those that its flags name. Without `port` a free one is taken, without `binary`
    one is found or built.
    """

    def __init__(
        self,
        model: Path | None,
        *flags: str,
        slot_dir: Path | None = None,
        port: int | None = None,
        binary: Path | None = None,
    ) -> None:
        self.model = model
        self.slot_dir = slot_dir
        self.port = port or _free_port()
        self._binary = binary
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        descriptor, name = tempfile.mkstemp(prefix="llama-server-", suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        weakref.finalize(self, self._log.unlink)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start the process and wait until it is healthy; RuntimeError with the log's tail if it never is."""
        assert not self.is_running, "start() of a server that runs"
        with self._log.open("ab") as log:
            # Not asyncio's subprocess: a server may outlive the event loop that started it (wide fixtures).
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=child.die_with_parent(signal.SIGKILL),
            )
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._healthy()
        except BaseException as error:
            await self.kill()
            if isinstance(error, TimeoutError):
                raise self._failed(f"was not healthy within {START_SECONDS:.0f} s") from error
            raise

    async def kill(self) -> None:
        """End it as a crash would (SIGKILL); nothing happens if it has ended already."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Ask it to end (SIGTERM), and kill it if it does not within 10 seconds."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._end(signal.SIGTERM)
        except TimeoutError:
            await self.kill()

    async def restart(self, delay: float = 0) -> None:
        """Kill it, stay away for `delay` seconds, and start a new life on the same port."""
        await self.kill()
        await asyncio.sleep(delay)
        await self.start()

    async def wait(self) -> int:
        """Wait until the process has ended by itself; its exit code, negative for a signal."""
        return await asyncio.to_thread(self._started().wait)

    def log(self) -> str:
        """The output of every life so far."""
        return self._log.read_text(errors="replace")

    async def slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = await self.get_json("/slots")
        return slots

    async def props(self) -> dict[str, Any]:
        props: dict[str, Any] = await self.get_json("/props")
        return props

    async def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name, as in `llamacpp:prompt_tokens_total`."""
        lines = (await self._get("/metrics")).decode().splitlines()
        return {
            name: float(value)
            for name, value in (line.split() for line in lines if line[:1] not in ("", "#"))
        }

    async def get_json(self, path: str) -> Any:
        async with self._session() as session, session.get(path) as response:
            response.raise_for_status()
            return await response.json()

    async def post_json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON whatever its status, so that errors can be looked at."""
        async with self._session() as session, session.post(path, json=body) as response:
            return await response.json()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self.is_running and self._process else "not running"
        name = "router" if self.model is None else self.model.stem
        return f"<LlamaServer {name} at {self.base_url}, {state}>"

    def _command(self) -> list[str]:
        binary = self._binary or _found_once()
        slots = ["--slot-save-path", str(self.slot_dir)] if self.slot_dir else []
        model = ["--model", str(self.model)] if self.model else []
        return [str(binary), *DEFAULT_FLAGS, *model, "--port", str(self.port), *slots, *self._flags]

    async def _healthy(self) -> None:
        async with self._session() as session:
            while not await _answers_ok(session):
                if not self.is_running:
                    raise self._failed(f"ended with code {self._started().returncode}")
                await asyncio.sleep(POLL_SECONDS)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)  # does nothing to a process that has ended
        await self.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server was never started"
        return self._process

    def _failed(self, what: str) -> RuntimeError:
        return RuntimeError(f"llama-server {what}; the end of its log:\n{self.log()[-LOG_TAIL_BYTES:]}")

    async def _get(self, path: str) -> bytes:
        async with self._session() as session, session.get(path) as response:
            response.raise_for_status()
            return await response.read()

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.base_url, timeout=aiohttp.ClientTimeout(total=START_SECONDS))


async def _answers_ok(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/health") as response:
            return response.status == 200
    except aiohttp.ClientError:  # nobody listens yet
        return False


@functools.cache
def _found_once() -> Path:
    return llama_server.find_or_build()


def _free_port() -> int:
    """A port that is free now. Another process may take it first: then the server ends, and says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
