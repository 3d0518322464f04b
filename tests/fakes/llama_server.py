"""A fake llama-server: in a test `async with FakeLlamaServer(slots=2, slot_dir=path) as fake`, or by hand

python -m tests.fakes.llama_server --port 8080 --slots 2 --slot-save-path DIR --set slow_first_token=1.5
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from scripts.ports import free_port
from tests.fakes.actions import Saved, SlotActions
from tests.fakes.app import Api, Call
from tests.fakes.engine import Engine
from tests.fakes.faults import Faults, set_fault
from tests.fakes.runs import Run
from tests.fakes.state import Slot, SlotBank
from tests.fakes.views import Setup
from tests.fakes.wire import Wire, reset_all

_SETUP_NAMES = {field.name for field in fields(Setup)} - {"marker"}


@dataclass(slots=True)
class Life:
    """From one start to the next death."""

    engine: Engine
    api: Api
    runner: web.AppRunner
    listener: asyncio.Server
    ended: asyncio.Event


class TooLate(asyncio.Protocol):
    """A connection that was being accepted when the server died."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class FakeLlamaServer:
    """One server at one port over any number of lives. Keywords are fields of Setup or Faults."""

    def __init__(self, *, port: int = 0, host: str = "127.0.0.1", **options: Any) -> None:
        self.host = host
        self.port = port
        self.setup = Setup(**{name: value for name, value in options.items() if name in _SETUP_NAMES})
        self.faults = Faults(**{name: value for name, value in options.items() if name not in _SETUP_NAMES})
        self.on_save: Callable[[Saved], Awaitable[None] | None] | None = None
        self.calls: list[Call] = []
        self.violations: list[str] = []
        self.runs: list[Run] = []
        self.lives = 0
        self.aborts = 0
        self._life: Life | None = None
        self._engine: Engine | None = None
        self._burials: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        return self._life is not None

    @property
    def slots(self) -> list[Slot]:
        return self._last_engine.bank.slots

    @property
    def max_concurrent_on_slot(self) -> int:
        """Most requests and actions at one slot at a time in this life; more than 1 is a violation."""
        return self._last_engine.max_concurrent_on_slot

    @property
    def media_marker(self) -> str:
        return self.setup.marker

    @property
    def _last_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the fake was never started")
        return self._engine

    def management(self) -> list[tuple[str, int | None, str | None]]:
        """Slot actions in order of arrival: action, slot, file name."""
        return [(call.action, call.slot, call.filename) for call in self.calls if call.action]

    async def start(self, **changes: Any) -> None:
        """Begins a life on the same port: empty slots, task ids from 0, a new media marker."""
        if self._life is not None:
            raise RuntimeError("the fake is already running")
        await self._bury()
        self.setup = replace(self.setup, **changes, marker=Setup().marker)
        ended = asyncio.Event()
        engine = Engine(self._new_bank(), self.faults, self.violations, self.runs, self.lives)
        wire = Wire(self.faults, idle_close=self.setup.idle_close, max_requests=self.setup.max_requests)
        api = Api(self.setup, self.faults, engine, wire, self._actions(), self.calls, ended)
        runner = web.AppRunner(
            api.application(),
            access_log=None,
            keepalive_timeout=self.setup.idle_close,
            shutdown_timeout=0.01,
            handler_cancellation=False,
        )
        await runner.setup()
        if runner.server is None:
            raise RuntimeError("aiohttp made no server")
        listener = await self._listen(runner.server, ended)
        self._engine = engine
        self._life = Life(engine, api, runner, listener, ended)
        self.lives += 1

    async def kill(self) -> None:
        """Dies at once, as from kill -9: connections reset, slots gone. Safe to await from a hook."""
        self._die(hard=True)

    async def stop(self) -> None:
        """Ends the current life, if any, and waits until nothing of it is left."""
        self._die(hard=False)
        await self._bury()

    async def restart(self, **changes: Any) -> None:
        await self.kill()
        await self.start(**changes)

    def sleep(self) -> None:
        """Goes to sleep: slots are emptied, the next request but a few wakes it."""
        engine = self._last_engine
        engine.bank = self._new_bank()
        if self._life is not None:
            self._life.api.sleeping = True

    def _new_bank(self) -> SlotBank:
        setup = self.setup
        return SlotBank(
            setup.slots,
            setup.n_ctx,
            ram_cache=setup.cache_ram,
            volatile=setup.volatile,
            draft=setup.draft,
            cells=setup.n_ctx if setup.is_shared else None,
        )

    def _actions(self) -> SlotActions | None:
        if self.setup.slot_dir is None:
            return None
        return SlotActions(
            slot_dir=Path(self.setup.slot_dir),
            geometry=self.setup.geometry,
            faults=self.faults,
            abort=self._abort,
            has_room=lambda slot, tokens: self._last_engine.bank.has_room(slot, tokens),
            on_save=lambda: self.on_save,
        )

    def _abort(self) -> None:
        self.aborts += 1
        self._die(hard=True)

    async def _listen(self, server: web.Server, ended: asyncio.Event) -> asyncio.Server:
        """A server of our own and not an aiohttp site: its socket can be closed without waiting."""

        def protocol() -> asyncio.BaseProtocol:
            return TooLate() if ended.is_set() else server()

        bound = socket.create_server((self.host, self.port or free_port()), backlog=512)
        self.port = bound.getsockname()[1]
        return await asyncio.get_running_loop().create_server(protocol, sock=bound, backlog=512)

    def _die(self, *, hard: bool) -> None:
        life, self._life = self._life, None
        if life is None:
            return
        life.ended.set()
        life.api.slot_routes.stop()
        life.engine.stop()
        _stop_listening(life.listener)
        if hard and life.runner.server is not None:
            reset_all(life.runner.server)
        burial = asyncio.get_running_loop().create_task(_buried(life, hard=hard))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)

    async def _bury(self) -> None:
        if self._burials:
            await asyncio.gather(*self._burials)


def _stop_listening(listener: asyncio.Server) -> None:
    """Refuse whoever comes from now on. Not by `close`, which loses those that are just being accepted: they
    would stand there unanswered for ever."""
    for sock in listener.sockets:
        asyncio.get_running_loop().remove_reader(sock)
        sock.shutdown(socket.SHUT_RDWR)


async def _buried(life: Life, *, hard: bool) -> None:
    # A connection that was accepted just before is only now made.
    for _ in range(3):
        await asyncio.sleep(0)
    life.listener.close()
    if hard and life.runner.server is not None:
        reset_all(life.runner.server)
    await life.runner.cleanup()


async def serve(fake: FakeLlamaServer) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with fake:
        sys.stdout.write(f"fake llama-server at {fake.base_url}\n")
        sys.stdout.flush()
        await stopped.wait()


def parse(arguments: list[str] | None = None) -> FakeLlamaServer:
    parser = argparse.ArgumentParser(prog="fake-llama-server", description="A fake llama-server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--slots", "-np", type=int, default=2)
    parser.add_argument("--n-ctx", type=int, default=8192, help="tokens per slot")
    parser.add_argument("--slot-save-path", type=Path, default=None, metavar="DIR")
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--volatile", action="store_true", help="behave as with default flags")
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="FAULT=VALUE", help="see faults.py")
    given = parser.parse_args(arguments)
    fake = FakeLlamaServer(
        host=given.host,
        port=given.port,
        slots=given.slots,
        n_ctx=given.n_ctx,
        slot_dir=given.slot_save_path,
        api_key=given.api_key,
        volatile=given.volatile,
        embeddings=given.embeddings,
    )
    for fault in given.set:
        try:
            set_fault(fake.faults, fault)
        except ValueError as problem:
            parser.error(str(problem))
    return fake


if __name__ == "__main__":
    asyncio.run(serve(parse()))
