from __future__ import annotations

import pytest

from kvproxy.boundary.turn import Asked
from kvproxy.checkpoint.extension import RENDER_SECONDS, is_extended, obstacle_to
from kvproxy.snapshots.manifest import digest_of_ids
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream.replies import Obstacle, Unavailable
from tests.support.fakes_core import World, generation_of

ASKED = Asked("chat/completions", {"messages": [{"role": "user", "content": "the same beginning"}]})
IDS = tuple(b"<user>the same beginning<assistant>")
DIGEST = digest_of_ids(IDS[:-1])


async def extended(w: World, digest: str | None = DIGEST, asked: Asked | None = ASKED) -> bool | None:
    return await is_extended(w.parts, len(IDS) - 1, digest, asked)


async def test_a_prompt_that_begins_with_it_and_goes_on_extends_it() -> None:
    assert await extended(World()) is True


@pytest.mark.parametrize("stored", [IDS, (*IDS, 1), (*IDS[:-2], 0)])
async def test_one_that_ends_with_it_before_it_or_turns_off_does_not(stored: tuple[int, ...]) -> None:
    assert await is_extended(World().parts, len(stored), digest_of_ids(stored), ASKED) is False


async def test_what_is_not_known_on_both_sides_is_not_known() -> None:
    w = World()
    assert (await extended(w, None), await extended(w, asked=None), w.log) == (None, None, [])
    w.server.answer("render", Unavailable(Obstacle.UNREACHABLE, f"no answer within {RENDER_SECONDS} s"))
    assert await extended(w) is None


@pytest.mark.parametrize("kind", MemoryKind)
@pytest.mark.parametrize("is_told_by_the_file", [True, False])
async def test_who_can_roll_back_or_is_not_known_to_be_unable_to_is_not_asked(
    kind: MemoryKind, is_told_by_the_file: bool
) -> None:
    w = World()
    if is_told_by_the_file:
        w.files.kind = kind
    else:
        w.standing.set(kind=kind)
    one = generation_of(tokens=len(IDS), ids_digest=digest_of_ids(IDS))
    told = await obstacle_to(w.parts, w.table.epoch, one, ASKED)
    assert w.standing.facts.kind is kind
    is_asked = kind not in (MemoryKind.FULL, MemoryKind.UNKNOWN)
    assert (told, "render" in w.log) == (
        f"the prompt does not extend the {len(IDS)} tokens of the snapshot" if is_asked else None,
        is_asked,
    )
