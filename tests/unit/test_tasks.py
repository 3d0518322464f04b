from __future__ import annotations

import asyncio
import gc

import pytest

from kvproxy import tasks as tasks_module
from kvproxy.tasks import TaskSet
from tests.support.fakes_core import settle


class Owner:
    def __init__(self) -> None:
        self.heard: list[tuple[str, BaseException]] = []
        self.tasks = TaskSet(lambda name, error: self.heard.append((name, error)))


async def give(value: int) -> int:
    return value


async def fail(error: BaseException) -> None:
    raise error


async def test_a_task_runs_and_is_forgotten_when_it_ends() -> None:
    owner = Owner()
    task = owner.tasks.spawn(give(7), name="give")
    assert (len(owner.tasks), repr(owner.tasks)) == (1, "<TaskSet ['give']>")

    assert await task == 7
    await settle(2)
    assert (len(owner.tasks), owner.heard) == (0, [])


async def test_its_owner_hears_of_one_that_nobody_awaits_and_that_dies() -> None:
    owner, error = Owner(), ValueError("oops")
    owner.tasks.spawn(fail(error), name="digest")
    await settle()
    gc.collect()
    assert owner.heard == [("digest", error)]


async def test_a_task_that_is_kept_is_told_of_and_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "FIRST_PAUSE_SECONDS", 0)
    owner, error = Owner(), ValueError("oops")
    begun: list[str] = []

    async def work() -> None:
        begun.append("anew")
        if len(begun) < 3:
            raise error

    await owner.tasks.keep(work, name="rounds")
    assert (len(begun), owner.heard) == (3, [("rounds", error), ("rounds", error)])


async def test_a_task_that_is_kept_ends_when_it_is_cancelled() -> None:
    owner = Owner()
    owner.tasks.keep(asyncio.Event().wait, name="rounds")
    await settle()

    await owner.tasks.cancel()

    assert (len(owner.tasks), owner.heard) == (0, [])


async def test_a_task_that_was_cancelled_has_not_died() -> None:
    owner = Owner()
    owner.tasks.spawn(asyncio.Event().wait(), name="waits")
    await settle()

    await owner.tasks.cancel()

    assert (len(owner.tasks), owner.heard) == (0, [])


async def test_cancelling_waits_until_each_has_put_things_in_order() -> None:
    owner, steps = Owner(), []

    async def orderly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await settle()
            steps.append("tidy")

    owner.tasks.spawn(orderly(), name="orderly")
    await settle()
    await owner.tasks.cancel()
    assert steps == ["tidy"]


async def test_there_may_be_nothing_to_cancel_and_nothing_to_wait_for() -> None:
    owner = Owner()
    await owner.tasks.cancel()
    assert await owner.tasks.wait()


async def test_waiting_tells_whether_all_have_ended_in_time() -> None:
    owner, gate = Owner(), asyncio.Event()
    owner.tasks.spawn(gate.wait(), name="waits")

    assert not await owner.tasks.wait(timeout=0.0)
    gate.set()
    assert await owner.tasks.wait(timeout=5.0)
