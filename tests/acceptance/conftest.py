"""A real llama-server, kvproxy before it as a process, and a wire in between that tells what was asked."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.daemon import Kvproxy
from tests.support.judge import Judge
from tests.support.real import LlamaServer
from tests.support.wiretap import Wiretap


@dataclass(frozen=True, slots=True)
class Stage:
    llama: LlamaServer
    tap: Wiretap
    kvproxy: Kvproxy
    slot_dir: Path
    state_dir: Path

    @property
    def url(self) -> str:
        return self.kvproxy.base_url


SetStage = Callable[..., Awaitable[Stage]]


@pytest.fixture
async def set_stage(tiny_llama: Path, tmp_path: Path) -> AsyncIterator[SetStage]:
    """Start all three. `flags` are the server's, `settings` kvproxy's. `is_visible`: kvproxy sees the
    server's save directory. `is_tapped`: the wire is in between (it costs time)."""
    async with AsyncExitStack() as stack:

        async def start(
            *flags: str,
            settings: tuple[str, ...] = (),
            is_visible: bool = True,
            is_tapped: bool = True,
            model: Path = tiny_llama,
            slot_dir: Path = tmp_path / "slots",
            state_dir: Path = tmp_path / "state",
        ) -> Stage:
            slot_dir.mkdir(exist_ok=True)
            llama = LlamaServer(model, *flags, slot_dir=slot_dir)
            await stack.enter_async_context(llama)
            tap = await stack.enter_async_context(Wiretap(llama.port))
            seen = slot_dir if is_visible else None
            upstream = tap.url if is_tapped else llama.base_url
            kvproxy = Kvproxy(upstream, state_dir, *settings, snapshot_dir=seen)
            await stack.enter_async_context(kvproxy)
            tap.forget()
            return Stage(llama, tap, kvproxy, slot_dir, state_dir)

        yield start


@pytest.fixture
async def judge(tiny_llama: Path) -> AsyncIterator[Judge]:
    async with LlamaServer(tiny_llama, "-c", "8192", "-np", "1") as server:
        yield Judge(server)


MEASURED = pytest.StashKey[list[str]]()
Measured = Callable[[str], None]


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> Measured:
    """Note a figure, to be read at the end of the run."""
    return pytestconfig.stash.setdefault(MEASURED, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(MEASURED, []):
        terminalreporter.write_line(f"measured: {line}")


@pytest.fixture(scope="session")
def repeats() -> Callable[[int, int], int]:
    """How often a test repeats its core: `few` by default, `many` with KVPROXY_TEST_REPEAT=1."""
    wants_many = os.environ.get("KVPROXY_TEST_REPEAT", "") not in ("", "0")
    return lambda few, many: many if wants_many else few
