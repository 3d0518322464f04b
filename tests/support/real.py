"""A real llama-server for tests, which can be killed and brought back on the same port."""

from __future__ import annotations

import asyncio
import functools
import signal
from pathlib import Path
from typing import Any

from scripts import llama_server
from tests.support.process import ManagedProcess

START_SECONDS = 60.0
STOP_SECONDS = 10.0
DEFAULT_FLAGS = ("--host", "127.0.0.1", "--no-warmup", "-t", "1", "--metrics", "--slots")


class LlamaServer(ManagedProcess):
    """One llama-server process at a time.

    `flags` come after the defaults and win over them. Without `slot_dir` slots cannot be saved. Without
    `model` it is a router of those that its flags name. Without `binary` one is found or built.
    """

    def __init__(
        self,
        model: Path | None,
        *flags: str,
        slot_dir: Path | None = None,
        port: int | None = None,
        binary: Path | None = None,
    ) -> None:
        super().__init__("llama-server", port=port)
        self.model = model
        self.slot_dir = slot_dir
        self._binary = binary
        self._flags = flags

    async def start(self) -> None:
        """It is up once it is healthy."""
        await self._start("/health", START_SECONDS)

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

    async def post_json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON whatever its status, so that errors can be looked at."""
        async with self._session() as session, session.post(path, json=body) as response:
            return await response.json()

    def _command(self) -> list[str]:
        binary = self._binary or _found_once()
        slots = ["--slot-save-path", str(self.slot_dir)] if self.slot_dir else []
        model = ["--model", str(self.model)] if self.model else []
        return [str(binary), *DEFAULT_FLAGS, *model, "--port", str(self.port), *slots, *self._flags]

    async def _get(self, path: str) -> bytes:
        async with self._session() as session, session.get(path) as response:
            response.raise_for_status()
            return await response.read()


@functools.cache
def _found_once() -> Path:
    return llama_server.find_or_build()
