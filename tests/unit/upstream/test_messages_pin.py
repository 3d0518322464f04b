from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.messages_pin import honours_messages_pin
from kvproxy.upstream.replies import Unavailable
from tests.fakes.llama_server import FakeLlamaServer


@asynccontextmanager
async def met(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[FakeLlamaServer, LlamaServer]]:
    async with FakeLlamaServer(**{"slots": 2, "slot_dir": tmp_path, **options}) as fake:
        client = LlamaServer(fake.base_url, None, connect_timeout_seconds=1)
        try:
            yield fake, client
        finally:
            await client.close()


async def verdict(client: LlamaServer) -> bool:
    slots = await client.slots()
    assert not isinstance(slots, Unavailable)
    return await honours_messages_pin(client, slots)


def questions(fake: FakeLlamaServer) -> int:
    return sum(call.path == "/v1/messages" for call in fake.calls)


async def test_a_server_that_chooses_by_itself_is_told_by_one_question(tmp_path: Path) -> None:
    async with met(tmp_path) as (fake, client):
        assert await verdict(client) is False
        assert questions(fake) == 1
        assert [slot.tokens for slot in fake.slots] == [[], []]


async def test_a_server_that_takes_the_slot_of_before_is_found_out_after_a_lucky_first(
    tmp_path: Path,
) -> None:
    async with met(tmp_path) as (fake, client):
        fake.slots[1].last_used = 9  # as after a request there: now it begins with the other one
        assert await verdict(client) is False
        assert questions(fake) == 2
        assert [slot.tokens for slot in fake.slots] == [[], []]


async def test_a_server_that_obeys_is_seen_to(tmp_path: Path) -> None:
    async with met(tmp_path, messages_pin=True) as (fake, client):
        assert await verdict(client) is True
        assert questions(fake) == 3
        assert [slot.tokens for slot in fake.slots] == [[], []]


async def test_a_server_that_holds_something_or_has_one_slot_is_left_alone(tmp_path: Path) -> None:
    async with met(tmp_path, messages_pin=True) as (fake, client):
        await client.complete(fake.slots[0].id, (5, 6, 7), n_predict=0, timeout=5)  # type: ignore[arg-type]
        assert await verdict(client) is False
        assert questions(fake) == 0
    async with met(tmp_path, messages_pin=True, slots=1) as (fake, client):
        assert await verdict(client) is False
        assert questions(fake) == 0


async def test_a_server_without_the_route_is_none_that_obeys(tmp_path: Path) -> None:
    async with met(tmp_path, messages_pin=True) as (fake, client):
        fake.faults.fail("completion", "error")
        assert await verdict(client) is False


async def test_no_action_meets_a_slot_that_is_still_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvproxy.upstream.messages_pin.TRIAL_SECONDS", 0.05)
    async with met(tmp_path, http_poll=5.0) as (fake, client):
        fake.faults.slow_first_token = 0.2
        assert await verdict(client) is False
        assert any(slot.is_processing for slot in fake.slots)
        assert fake.violations == []
