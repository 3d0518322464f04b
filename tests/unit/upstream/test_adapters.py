from __future__ import annotations

import json

import pytest

from kvproxy.upstream.adapters import adapters_field, ask_adapters
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Adapter, Obstacle, Unavailable
from tests.support.raw_http import RawServer, reply

ONE, TWO = Adapter(0, "/l/one.gguf", 1.0), Adapter(1, "/l/two.gguf", 0.5)


def test_without_adapters_the_field_is_empty() -> None:
    assert adapters_field(()) == ""


def test_an_adapter_of_scale_nothing_changes_nothing() -> None:
    assert adapters_field((Adapter(0, "/l/one.gguf", 0.0), TWO)) == adapters_field((TWO,))


def test_ids_paths_and_scales_are_told() -> None:
    assert json.loads(adapters_field((TWO, ONE))) == [[0, "/l/one.gguf", "1"], [1, "/l/two.gguf", "0.5"]]


@pytest.mark.parametrize(
    "other", [Adapter(1, ONE.path, 1.0), Adapter(0, "/l/x", 1.0), Adapter(0, ONE.path, 0.9)]
)
def test_another_adapter_is_another_field(other: Adapter) -> None:
    assert adapters_field((ONE,)) != adapters_field((other,))


def test_a_scale_reads_as_it_was_given() -> None:
    assert '"0.1"' in adapters_field((Adapter(0, "/l/one.gguf", 0.10000000149011612),))


def test_paths_cannot_run_into_one_another() -> None:
    tricky = Adapter(0, '/l/a","1"],[1,"/l/b', 1.0)
    assert adapters_field((tricky,)) != adapters_field((Adapter(0, "/l/a", 1.0), Adapter(1, "/l/b", 1.0)))


@pytest.mark.parametrize(
    ("status", "body", "answer"),
    [
        (200, [], ""),
        (200, [{"id": 0, "path": "/l/x", "scale": 1.0, "task_name": ""}], '[[0,"/l/x","1"]]'),
        (501, {"error": "off"}, Unavailable(Obstacle.UNSUPPORTED, "off")),
    ],
)
async def test_the_server_is_asked(status: int, body: object, answer: str | Unavailable) -> None:
    async with RawServer(lambda _: reply(status, body)) as raw:
        client = LlamaServer(raw.url, None, connect_timeout_seconds=2.0)
        try:
            assert await ask_adapters(client) == answer
        finally:
            await client.close()
        assert raw.requests[0].line == "GET /lora-adapters HTTP/1.1"
