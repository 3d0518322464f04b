"""One memory for all slots (`--kv-unified`): what shows that there is one, and what comes of a full one."""

from __future__ import annotations

import asyncio

import pytest

from kvproxy.slotfile.layout import Layout, read_layout
from tests.contract.subject import Flags, Subject

LONG = "abcdefghijklmnopqrstuvwxyz" * 8
SHARED = Flags(unified=True, n_ctx=512)


@pytest.mark.parametrize(
    ("flags", "streams"),
    [(Flags(), 2), (Flags(slots=4), 4), (SHARED, 1), (Flags(defaults=True), 1)],
)
async def test_a_slot_file_tells_whether_the_slots_share_one_memory(server: Subject, streams: int) -> None:
    await server.complete("one two three", id_slot=1)
    await server.act("save", 1, "told")
    layout = read_layout(server.slot_dir / "told")
    assert isinstance(layout, Layout)
    assert layout.streams == streams


@pytest.mark.parametrize("flags", [SHARED])
async def test_two_running_requests_that_do_not_fit_together_both_fail_and_their_slots_are_emptied(
    server: Subject,
) -> None:
    bodies = [server.body(LONG[:150], n_predict=300, id_slot=slot) for slot in (0, 1)]
    replies = await asyncio.gather(*(server.ask("POST", "/completion", body) for body in bodies))
    assert [reply.status for reply in replies] == [500, 500]
    assert {reply.error["message"] for reply in replies} == {"Context size has been exceeded."}
    assert [await server.held(slot) for slot in (0, 1)] == [0, 0]
    assert [slot["n_prompt_tokens"] for slot in await server.slots()] == [0, 0]


@pytest.mark.parametrize("flags", [SHARED])
async def test_a_stream_that_is_cut_off_ends_with_the_error(server: Subject) -> None:
    other = asyncio.create_task(server.ask("POST", "/completion", server.body(LONG, 300, id_slot=0)))
    body = server.body(LONG, n_predict=300, id_slot=1, stream=True)
    async with server.stream("/completion", body) as stream:
        assert stream.response.status == 200
        text = await stream.rest()
    assert "Context size has been exceeded." in text.splitlines()[-2]
    assert (await other).status == 500


@pytest.mark.parametrize("flags", [SHARED])
async def test_an_idle_slot_that_was_emptied_for_room_shows_it_in_slots(server: Subject) -> None:
    await server.complete(LONG, id_slot=0)
    await server.complete(LONG[::-1] + LONG[::-1][:150], id_slot=1)
    shown = await server.slots()
    assert shown[0]["n_prompt_tokens"] == 0
    assert shown[1]["n_prompt_tokens"] > 300


@pytest.mark.parametrize("flags", [Flags(unified=True, n_ctx=1024)])
async def test_room_is_for_so_many_tokens_as_one_slot_may_have(server: Subject) -> None:
    """What two slots hold together may come close to a slot's context, and what is held stays held."""
    await server.complete(LONG * 2, n_predict=1, id_slot=0)
    room = 1024 - await server.held(0)
    tokens = await server.tokens_of(LONG * 3)
    assert tokens > room - 30
    await server.complete((LONG * 3)[: room - 30], n_predict=1, id_slot=1)
    assert await server.held(0) > 400
