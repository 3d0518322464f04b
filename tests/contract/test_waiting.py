"""Busy slots: who waits, who is let go on, and what a client that leaves sets free."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import pytest

from tests.contract.subject import Flags, Subject

A = "a conversation that waits " * 4
SLOW_PROMPTS = Flags(n_ctx=8192, prefill_rate=8000.0)


async def unanswered(task: asyncio.Task[object], seconds: float = 0.3) -> bool:
    done, _ = await asyncio.wait([task], timeout=seconds)
    return not done


async def test_a_pinned_stream_sends_nothing_until_its_slot_is_free(server: Subject) -> None:
    loop = asyncio.get_running_loop()
    async with server.busy(0) as first:
        body = server.body(A, 3, id_slot=0, stream=True)
        waiting = loop.create_task(server.ask("POST", "/completion", body))
        assert await unanswered(waiting)
        await first.rest()
    reply = await waiting
    assert reply.events[-1]["id_slot"] == 0
    assert reply.events[-1]["tokens_predicted"] == 3


async def test_other_slots_and_the_slot_view_go_on_meanwhile(server: Subject) -> None:
    async with server.busy(0):
        waiting = asyncio.create_task(server.complete(A, id_slot=0))
        assert (await server.complete(A, id_slot=1))["id_slot"] == 1
        assert [slot["is_processing"] for slot in await server.slots()] == [True, False]
        assert not waiting.done()
    assert (await waiting)["id_slot"] == 0


async def test_an_action_waits_for_its_busy_slot_but_not_for_another(server: Subject) -> None:
    async with server.busy(0):
        assert (await server.act("save", 1, "other")).status == 200
        waiting = asyncio.create_task(server.act("save", 0, "busy"))
        assert await unanswered(waiting)
    assert (await waiting).json["n_saved"] > 0


async def test_one_waiting_action_goes_on_per_release_and_the_rest_hang(server: Subject) -> None:
    async with server.busy(0):
        saves = [asyncio.create_task(server.act("save", 0, f"s{i}")) for i in range(3)]
        assert await unanswered(saves[0])
    await server.until_idle(0)
    await asyncio.wait(saves, timeout=0.3)
    assert sum(save.done() for save in saves) == 1
    await server.complete(A, id_slot=1)
    await asyncio.wait(saves, timeout=0.3)
    assert sum(save.done() for save in saves) == 2
    await server.complete(A, id_slot=1)
    await asyncio.gather(*saves)


async def test_a_pinned_request_overtakes_a_waiting_save_which_then_saves_its_content(
    server: Subject,
) -> None:
    async with server.busy(0):
        save = asyncio.create_task(server.act("save", 0, "stolen"))
        assert await unanswered(save, 0.1)
        overtaker = asyncio.create_task(server.complete(A, n_predict=1, id_slot=0))
        assert await unanswered(overtaker, 0.1)
    answer = await overtaker
    assert (await save).json["n_saved"] == answer["tokens_evaluated"]


@pytest.mark.parametrize("flags", [Flags(cache_ram=True)])
async def test_with_a_prompt_cache_a_pin_on_a_busy_slot_puts_its_content_under_the_running_answer(
    server: Subject,
) -> None:
    before = await server.complete(A * 5, id_slot=0)
    await server.complete("something else", id_slot=0)
    async with server.busy(0):
        own = (await server.slots())[0]["n_prompt_tokens"]
        waiting = asyncio.create_task(server.complete(A * 5, id_slot=0))
        assert await unanswered(waiting, 0.1)
        swapped = (await server.slots())[0]["n_prompt_tokens"]
    await waiting
    assert own < before["tokens_evaluated"] < swapped


@pytest.mark.parametrize("flags", [Flags(cache_ram=True)])
async def test_without_anything_better_in_the_prompt_cache_the_running_answer_is_left_alone(
    server: Subject,
) -> None:
    async with server.busy(0):
        waiting = asyncio.create_task(server.complete(A * 5, id_slot=0))
        assert await unanswered(waiting, 0.1)
        decoded = (await server.slots())[0]
    answer = await waiting
    assert decoded["n_prompt_tokens"] < decoded["next_token"][0]["n_decoded"] + 50
    assert answer["timings"]["cache_n"] < 10


@pytest.mark.parametrize("flags", [SLOW_PROMPTS])
async def test_headers_come_when_the_slot_starts_and_the_first_byte_after_the_prompt(server: Subject) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with server.stream("/completion", server.body("x" * 8000, 2, id_slot=0, stream=True)) as stream:
        headers_after = loop.time() - began
        assert (await server.slots())[0]["is_processing"] is True
        await stream.first_byte()
        first_byte_after = loop.time() - began
    assert stream.response.status == 200
    assert first_byte_after > headers_after + 0.1


@pytest.mark.parametrize("flags", [SLOW_PROMPTS])
async def test_a_save_of_an_idle_slot_waits_for_another_slots_prompt_batch(server: Subject) -> None:
    loop = asyncio.get_running_loop()
    async with server.stream("/completion", server.body("x" * 8000, 2, id_slot=0, stream=True)):
        began = loop.time()
        await server.slots()
        seen_after = loop.time() - began
        assert (await server.act("save", 1, "idle")).status == 200
        saved_after = loop.time() - began
    assert saved_after > seen_after + 0.05


async def test_a_client_that_leaves_mid_answer_frees_the_slot(server: Subject) -> None:
    async with server.busy(0):
        pass
    await server.until_idle(0)
    assert 0 < await server.held(0) < 1500


async def test_a_half_closed_connection_counts_as_gone(server: Subject) -> None:
    body = json.dumps(server.body("half", 1500, id_slot=0, stream=True)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"data: ")
    writer.get_extra_info("socket").shutdown(socket.SHUT_WR)
    await server.until_idle(0)
    assert await server.held(0) < 1500
    writer.close()


async def test_a_client_that_leaves_a_whole_answer_is_noticed_within_seconds(server: Subject) -> None:
    waiting = asyncio.create_task(server.complete(A, n_predict=-1, id_slot=0))
    assert await unanswered(waiting, 0.1)
    waiting.cancel()
    await asyncio.sleep(1.3)
    slot = (await server.slots())[0]
    assert slot["is_processing"] is False
    assert slot["n_prompt_tokens"] < 2047


async def test_a_conversation_id_keeps_the_answer_running(server: Subject) -> None:
    async with server.busy(0, n_predict=1500, **{"X-Conversation-Id": "c1"}):
        pass
    await server.until_idle(0)
    assert await server.held(0) > 1500


@pytest.mark.parametrize("flags", [Flags(n_ctx=8192)])
async def test_on_a_quiet_server_what_waits_for_a_client_that_left_never_runs(server: Subject) -> None:
    quiet = asyncio.create_task(server.complete("keep busy", n_predict=-1, id_slot=0))
    assert await unanswered(quiet, 0.1)
    dropped = [
        asyncio.create_task(server.complete(A, id_slot=0)),
        asyncio.create_task(server.act("save", 0, "dropped")),
    ]
    await asyncio.sleep(0.1)
    for task in dropped:
        task.cancel()
    await asyncio.sleep(1.3)
    assert not quiet.done()
    quiet.cancel()
    await asyncio.sleep(1.3)
    slot = (await server.slots())[0]
    assert slot["is_processing"] is False
    assert slot["n_prompt_tokens"] > len(A) + 100
    assert not (server.slot_dir / "dropped").exists()


async def test_beside_a_stream_what_waits_for_a_client_that_left_still_runs(server: Subject) -> None:
    """Any result restarts the server's wait before it looks at a client; the save holds foreign content."""
    async with server.busy(0) as stream:
        save = asyncio.create_task(server.act("save", 0, "dropped"))
        assert await unanswered(save, 0.1)
        request = asyncio.create_task(server.complete(A, n_predict=1, id_slot=0))
        assert await unanswered(request, 0.1)
        save.cancel()
        request.cancel()
        await stream.rest()
    await asyncio.sleep(0.5)
    n_prompt = await server.tokens_of(A)
    assert (await server.slots())[0]["n_prompt_tokens"] == n_prompt
    assert struct.unpack_from("<I", (server.slot_dir / "dropped").read_bytes(), 20) == (n_prompt,)
