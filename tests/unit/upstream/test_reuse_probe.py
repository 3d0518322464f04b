from __future__ import annotations

from typing import Any, cast

import pytest

from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.upstream.replies import (
    ActionFailure,
    Completed,
    Erased,
    Fault,
    Obstacle,
    Restored,
    Saved,
    Unavailable,
)
from kvproxy.upstream.reuse_probe import TEXT, Reuse, probe_reuse
from tests.support.fakes_core import FakeServer

NAME = SnapshotName("kvp-probe.kv")
S1 = SlotId(1)
COUNT = len(TEXT)
GONE = Unavailable(Obstacle.UNREACHABLE, "gone")
REFUSED = ActionFailure(Fault.REFUSED, "no")


async def probed(**answers: tuple[object, ...]) -> tuple[Reuse, FakeServer]:
    server = FakeServer()
    for verb, given in answers.items():
        server.answer(verb, *given)
    return await probe_reuse(cast(Any, server), S1, NAME), server


async def test_what_was_restored_and_gone_on_from_works() -> None:
    result, server = await probed(complete=(Completed(COUNT - 1, 0), Completed(1, COUNT - 1)))
    assert result is Reuse.WORKS
    assert server.log == [
        f"evaluate 1 {COUNT - 1}",
        "save 1",
        "erase 1",
        f"restore 1 {NAME}",
        f"evaluate 1 {COUNT}",
        "erase 1",
        "save 1",
    ]


async def test_a_restore_that_reuses_nothing_is_told() -> None:
    result, _ = await probed(complete=(Completed(COUNT - 1, 0), Completed(COUNT, 0)))
    assert result is Reuse.NOTHING


@pytest.mark.parametrize(
    "answers",
    [
        {"tokenize": (GONE,)},
        {"tokenize": ((1,),)},
        {"complete": (GONE,)},
        {"complete": (Completed(COUNT - 1, 0), GONE)},
        {"save": (REFUSED,)},
        {"save": (Saved(0, 36),)},
        {"erase": (REFUSED,)},
        {"restore": (REFUSED,)},
        {"restore": (Restored(5, 36),)},
    ],
)
async def test_what_is_not_answered_as_it_should_be_tells_nothing(
    answers: dict[str, tuple[object, ...]],
) -> None:
    result, _ = await probed(**{"erase": (Erased(1),), **answers})
    assert result is Reuse.UNKNOWN


@pytest.mark.parametrize("computed", [(GONE,), (Completed(COUNT - 1, 0), GONE)])
async def test_no_action_meets_the_slot_when_it_did_not_answer(computed: tuple[object, ...]) -> None:
    _, server = await probed(complete=computed)
    assert server.log[-1].startswith("evaluate 1")
