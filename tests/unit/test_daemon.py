"""What the process says at start of the server it stands in front of."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvproxy import daemon
from kvproxy.upstream.facts import ServerState
from tests.support.fakes_core import World


def runtime_of(world: World) -> Any:
    async def check_usable() -> None:
        return None

    settings = SimpleNamespace(
        retention=SimpleNamespace(max_total_bytes=10**9),
        upstreams=[SimpleNamespace(url="http://u", set_apart=0)],
    )
    files = SimpleNamespace(check_usable=check_usable)
    return cast(
        Any,
        SimpleNamespace(settings=settings, standing=world.standing, store=world.store, files=files),
    )


@pytest.mark.parametrize("state", [ServerState.UNREACHABLE, ServerState.LOADING])
async def test_what_the_watch_has_told_is_not_told_again_and_the_verdict_waits_for_the_server(
    state: ServerState, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "VERDICT_WAIT_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    world, ready = World(), asyncio.Event()
    world.standing.set(state=state, reason="connection refused")
    telling = asyncio.create_task(daemon.tell_verdict(runtime_of(world), ready))
    for _ in range(10):
        await asyncio.sleep(0)
    assert caplog.messages == []

    world.standing.set(state=ServerState.HEALTHY, reason="")
    ready.set()
    await telling

    (line,) = caplog.messages
    assert "conversations are saved and restored" in line


async def test_a_server_that_does_not_tell_who_it_is_is_not_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "VERDICT_WAIT_SECONDS", 0.0)
    world = World()
    world.standing.set(state=ServerState.DEGRADED, reason="it is a router", props=None)
    await daemon.tell_verdict(runtime_of(world), asyncio.Event())
    (line,) = caplog.messages
    assert line.endswith("it is a router; conversations do not survive")
