"""Several slots are several: nobody waits who need not, and both come back after a kill."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

import pytest

from tests.acceptance.conftest import Measured, SetStage
from tests.support.load import Answer, Conversation, client, run_load

pytestmark = pytest.mark.real

TWO_SLOTS = ("-c", "16384", "-np", "2", "--cache-ram", "0")
LOOSE_RATIO = 1.5
"""A machine shared with others is noisy; the figure itself is in the summary of the run."""


def talkers(count: int, tokens: int, salt: object = "") -> list[Conversation]:
    return [Conversation.about(f"talker {n} {salt}", 20, max_tokens=tokens) for n in range(count)]


async def test_two_sessions_stream_at_once_in_two_slots(set_stage: SetStage) -> None:
    stage = await set_stage(*TWO_SLOTS)
    seen_at_once = 0
    async with client(stage.url) as session:
        running = [asyncio.ensure_future(one.turn(session)) for one in talkers(2, 1500)]
        while not all(task.done() for task in running):
            seen_at_once = max(seen_at_once, sum(s["is_processing"] for s in await stage.llama.slots()))
            await asyncio.sleep(0.01)
    answers = [task.result() for task in running]
    assert [answer.status for answer in answers] == [200, 200]
    assert {answer.headers["x-kvproxy-slot"] for answer in answers} == {"0", "1"}
    assert seen_at_once == 2


async def test_four_sessions_at_concurrency_two_take_little_longer_than_directly(
    set_stage: SetStage, repeats: Callable[[int, int], int], measured: Measured
) -> None:
    stage = await set_stage(*TWO_SLOTS, is_tapped=False)
    urls = {"direct": stage.llama.base_url, "proxied": stage.url}
    took: dict[str, list[float]] = {name: [] for name in urls}
    for run in range(repeats(5, 15)):
        for name, url in urls.items():
            began = time.perf_counter()
            answers = await run_load(url, talkers(4, 200, f"{name} {run}"), turns=1, concurrency=2)
            took[name].append(time.perf_counter() - began)
            assert {answer.status for turn in answers for answer in turn} == {200}
    ratio = statistics.median(took["proxied"]) / statistics.median(took["direct"])
    measured(f"wall time of 4 sessions of 200 tokens at concurrency 2: {ratio:.3f} times direct")
    assert ratio <= LOOSE_RATIO


async def test_two_resident_sessions_both_come_back_after_a_kill_at_once(
    set_stage: SetStage, repeats: Callable[[int, int], int], measured: Measured
) -> None:
    stage = await set_stage(*TWO_SLOTS)
    pair = [Conversation.about("left"), Conversation.about("right")]
    rounds = repeats(5, 20)
    async with client(stage.url) as session:
        before: list[Answer] = [await one.turn(session) for one in pair]
        for _ in range(rounds):
            await stage.kvproxy.flush()
            assert {slot["state"] for slot in await stage.kvproxy.slots()} == {"resident"}
            await stage.llama.restart()
            after = await asyncio.gather(*(one.turn(session) for one in pair))
            assert [answer.outcome for answer in after] == ["restored", "restored"]
            for old, new in zip(before, after, strict=True):
                assert new.reused >= old.prompt
            before = after
    measured(f"two resident sessions restored in full right after a kill: {rounds} of {rounds} times")
