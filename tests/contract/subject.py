"""One face for the fake and the real llama-server, so that a contract test reads the same for both."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from tests.fakes.llama_server import FakeLlamaServer
from tests.support.real import LlamaServer


@dataclass(frozen=True, slots=True)
class Flags:
    """The command line, in the words of the contract."""

    slots: int = 2
    n_ctx: int = 2048
    """tokens per slot"""
    can_save: bool = True
    api_key: str | None = None
    defaults: bool = False
    """no -np, no --cache-ram: four slots in one unified memory"""
    unified: bool = False
    """one memory of `n_ctx` tokens for all slots, and idle ones are not cleared"""
    cache_ram: bool = False
    """the server's own prompt cache in memory"""
    sleep_after: int | None = None
    """seconds"""
    prefill_rate: float = 0.0
    """tokens per second of the fake, where the real one is slow by itself"""


def fake_server(flags: Flags, slot_dir: Path) -> FakeLlamaServer:
    return FakeLlamaServer(
        slots=4 if flags.defaults else flags.slots,
        n_ctx=flags.n_ctx,
        slot_dir=slot_dir if flags.can_save else None,
        api_key=flags.api_key,
        volatile=flags.defaults,
        unified=flags.unified,
        cache_ram=flags.cache_ram,
        prefill_rate=flags.prefill_rate,
        token_delay=0.0005,
    )


def real_server(flags: Flags, slot_dir: Path, model: Path) -> LlamaServer:
    many = [] if flags.defaults else ["-np", str(flags.slots)]
    ram = [] if flags.defaults or flags.cache_ram else ["--cache-ram", "0"]
    shared = ["--kv-unified", "--no-cache-idle-slots"] if flags.unified else []
    total = flags.n_ctx if flags.defaults or flags.unified else flags.n_ctx * flags.slots
    key = ["--api-key", flags.api_key] if flags.api_key else []
    sleep = ["--sleep-idle-seconds", str(flags.sleep_after)] if flags.sleep_after else []
    return LlamaServer(
        model,
        *["-c", str(total), *many, *shared, *ram, *key, *sleep],
        slot_dir=slot_dir if flags.can_save else None,
    )


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, self.text
        reason: dict[str, Any] = self.json["error"]
        return reason

    @property
    def events(self) -> list[Any]:
        """The data of each event of a stream, [DONE] as it stands."""
        lines = [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass(slots=True)
class Subject:
    """A running server and a client for it. What is asked of it is asked on fresh connections."""

    process: FakeLlamaServer | LlamaServer
    slot_dir: Path
    flags: Flags
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return self.process.port

    @property
    def is_fake(self) -> bool:
        return isinstance(self.process, FakeLlamaServer)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        data = body if isinstance(body, str) or body is None else json.dumps(body)
        async with (
            self.session() as session,
            session.request(method, path, data=data, headers={**self.headers, **headers}) as reply,
        ):
            return Reply(reply.status, dict(reply.headers), await reply.text())

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.process.base_url, timeout=aiohttp.ClientTimeout(total=30))

    async def get(self, path: str) -> Any:
        reply = await self.ask("GET", path)
        assert reply.status == 200, reply.text
        return reply.json

    async def act(self, action: str, slot: int | str, filename: str | None = None) -> Reply:
        body = None if filename is None else {"filename": filename}
        return await self.ask("POST", f"/slots/{slot}?action={action}", body)

    async def complete(self, prompt: Any, n_predict: int = 2, **more: Any) -> Any:
        """The native answer, which alone tells the slot it ran on."""
        reply = await self.ask("POST", "/completion", self.body(prompt, n_predict, **more))
        assert reply.status == 200, reply.text
        return reply.json

    @staticmethod
    def body(prompt: Any, n_predict: int, **more: Any) -> dict[str, Any]:
        return {"prompt": prompt, "n_predict": n_predict, "ignore_eos": True, **more}

    async def tokens_of(self, text: str) -> int:
        reply = await self.ask("POST", "/tokenize", {"content": text, "add_special": True})
        return len(reply.json["tokens"])

    async def slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = await self.get("/slots")
        return slots

    async def held(self, slot: int) -> int:
        """Tokens a slot holds, told by a save: /slots does not show what a restore brought."""
        reply = await self.act("save", slot, "held")
        count: int = reply.json["n_saved"]
        return count

    async def end(self) -> None:
        if isinstance(self.process, FakeLlamaServer):
            await self.process.stop()
        else:
            await self.process.kill()

    async def restart_with(self, **changes: Any) -> None:
        """The same server again with another command line."""
        self.flags = replace(self.flags, **changes)
        old = self.process
        await old.kill()
        if isinstance(old, LlamaServer):
            self.process = real_server(self.flags, self.slot_dir, old.model)
            await self.process.start()
        else:
            await old.start(**changes)

    async def asleep(self) -> None:
        """Returns when the server sleeps: the real one does so by itself, the fake is told to."""
        if isinstance(self.process, FakeLlamaServer):
            self.process.sleep()
        await self._until(self._sleeps, within=10.0)

    @contextlib.asynccontextmanager
    async def busy(self, slot: int, n_predict: int = 1500, **headers: str) -> AsyncIterator[Stream]:
        """A stream that keeps the slot busy for about a second, or until the block ends."""
        body = self.body("keep busy", n_predict, id_slot=slot, stream=True)
        async with self.stream("/completion", body, **headers) as stream:
            await stream.first_byte()
            yield stream

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Any, **headers: str) -> AsyncIterator[Stream]:
        """Inside the block the response's headers are there; leaving it closes the connection."""
        async with self.session() as session:
            request = session.post(path, data=json.dumps(body), headers={**self.headers, **headers})
            async with request as response:
                stream = Stream(response)
                yield stream
                response.close()

    async def until_idle(self, slot: int, within: float = 10.0) -> float:
        """Seconds until /slots shows the slot idle."""
        return await self._until(lambda: self._is_idle(slot), within)

    async def _is_idle(self, slot: int) -> bool:
        return not (await self.slots())[slot]["is_processing"]

    async def _sleeps(self) -> bool:
        return bool((await self.get("/props"))["is_sleeping"])

    async def _until(self, holds: Callable[[], Awaitable[bool]], within: float) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(int(within / 0.02)):
            if await holds():
                return loop.time() - began
            await asyncio.sleep(0.02)
        raise AssertionError(f"still waiting after {within} s")


class Stream:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self._read = bytearray()

    async def first_byte(self) -> None:
        self._read += await self.response.content.readany()

    async def rest(self) -> str:
        self._read += await self.response.content.read()
        return self._read.decode()
