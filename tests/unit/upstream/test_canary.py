from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pytest

from kvproxy.identifiers import SlotId
from kvproxy.snapshots.canary import Canary
from kvproxy.upstream.canary import PROMPT, TOP, ask_canary
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Obstacle, Unavailable
from tests.support.raw_http import HOLD, RawServer, reply

SLOT = SlotId(2)
SAID = {
    "timings": {"prompt_n": 13, "cache_n": 0},
    "completion_probabilities": [
        {"id": 5, "logprob": -9.0, "top_logprobs": [{"id": 7, "logprob": -0.5}, {"id": 3, "logprob": -1}]}
    ],
}


@pytest.fixture
async def raw() -> AsyncIterator[RawServer]:
    async with RawServer(lambda _: reply(200, SAID)) as server:
        yield server


@pytest.fixture
async def client(raw: RawServer) -> AsyncIterator[LlamaServer]:
    llama = LlamaServer(raw.url, None, connect_timeout_seconds=2.0)
    yield llama
    await llama.close()


async def test_the_canary_is_what_the_model_finds_likely(raw: RawServer, client: LlamaServer) -> None:
    assert await ask_canary(client, SLOT) == Canary.of([(7, -0.5), (3, -1.0)])
    sent = orjson.loads(raw.requests[0].body)
    assert (sent["id_slot"], sent["prompt"], sent["n_probs"]) == (SLOT, PROMPT, TOP)


async def test_a_server_that_does_not_answer_in_time_has_no_canary(
    raw: RawServer, client: LlamaServer
) -> None:
    raw.answer = lambda _: HOLD
    assert await ask_canary(client, SLOT, 0.02) == Unavailable(
        Obstacle.UNREACHABLE, "no answer within 0.02 s"
    )


def test_a_prompt_of_bytes_stays_below_the_batch_that_is_computed_otherwise() -> None:
    assert len(PROMPT.encode()) + 1 < 64
