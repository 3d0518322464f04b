from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest

from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.upstream import client as client_module
from kvproxy.upstream.client import ROUTER_ADVICE, LlamaServer
from kvproxy.upstream.replies import (
    ActionFailure,
    Completed,
    Erased,
    Fault,
    Obstacle,
    Props,
    Restored,
    Saved,
    SlotInfo,
    Unavailable,
)
from tests.support.raw_http import HOLD, RawRequest, RawServer, reply

LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
INVALID_NAME = {"error": {"code": 400, "message": "Invalid filename", "type": "invalid_request_error"}}
SAVED = {"id_slot": 1, "filename": "n", "n_saved": 24, "n_written": 12824, "timings": {"save_ms": 2}}
SLOT, NAME = SlotId(1), SnapshotName("n")

Connect = Callable[..., LlamaServer]


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with RawServer(lambda _: HOLD) as raw:
        yield raw


@pytest.fixture
async def connect(server: RawServer) -> AsyncIterator[Connect]:
    made: list[LlamaServer] = []

    def to_server(api_key: str | None = None, **more: Any) -> LlamaServer:
        made.append(LlamaServer(server.url, api_key, connect_timeout_seconds=2.0, **more))
        return made[-1]

    yield to_server
    for llama in made:
        await llama.close()


def always(status: int, body: object, *headers: str) -> Callable[[RawRequest], bytes]:
    return lambda _: reply(status, body, *headers)


async def next_request(server: RawServer) -> RawRequest:
    return await asyncio.wait_for(server.arrived.get(), 5)


async def test_props_are_asked_and_read(server: RawServer, connect: Connect) -> None:
    server.answer = always(200, {"total_slots": 3})
    props = await connect().props()
    assert isinstance(props, Props)
    assert props.total_slots == 3
    assert server.requests[0].line == "GET /props HTTP/1.1"


@pytest.mark.parametrize(
    ("status", "body", "reason", "message"),
    [
        (503, LOADING, Obstacle.LOADING, "Loading model"),
        (503, b"come back", Obstacle.UNREACHABLE, "come back"),
        (503, b"\n<html>", Obstacle.UNREACHABLE, "HTTP 503"),
        (502, b"", Obstacle.UNREACHABLE, "HTTP 502"),
        (401, {"error": {"message": "Invalid API Key"}}, Obstacle.UNAUTHORIZED, "Invalid API Key"),
        (403, b"no\x1b", Obstacle.UNAUTHORIZED, "no"),
        (404, b"", Obstacle.NOT_LLAMA_SERVER, "the answer to /props is not llama-server's (HTTP 404)"),
        (404, b"<html>", Obstacle.NOT_LLAMA_SERVER, "the answer to /props is not llama-server's (HTTP 404)"),
        (302, b"moved", Obstacle.NOT_LLAMA_SERVER, "the answer to /props is not llama-server's (moved)"),
        (404, {"error": {"message": "no"}}, Obstacle.NOT_LLAMA_SERVER, "no"),
        (501, {"error": "--slots"}, Obstacle.UNSUPPORTED, "--slots"),
        (200, {"role": "router", "max_instances": 4}, Obstacle.ROUTER, ROUTER_ADVICE),
        (200, b"hello", Obstacle.NOT_LLAMA_SERVER, "the answer to /props is not llama-server's"),
        (200, {"object": "list"}, Obstacle.NOT_LLAMA_SERVER, "the answer to /props is not llama-server's"),
    ],
)
async def test_why_there_are_no_props_is_told(
    server: RawServer, connect: Connect, status: int, body: object, reason: Obstacle, message: str
) -> None:
    server.answer = always(status, body)
    assert await connect().props() == Unavailable(reason, message)


async def test_a_server_that_does_not_answer_in_time_is_unreachable(connect: Connect) -> None:
    assert await connect().props(0.02) == Unavailable(Obstacle.UNREACHABLE, "no answer within 0.02 s")


async def test_a_refused_connection_is_unreachable(server: RawServer, connect: Connect) -> None:
    await server.refuse()
    assert await connect().props() == Unavailable(Obstacle.UNREACHABLE, "connection refused")


async def test_an_answer_cut_short_is_unreachable(server: RawServer, connect: Connect) -> None:
    server.answer = lambda _: b"HTTP/1.1 200 X\r\nContent-Length: 99\r\nConnection: close\r\n\r\n{"
    props = await connect().props()
    assert isinstance(props, Unavailable)
    assert props.reason is Obstacle.UNREACHABLE


async def test_slots_are_asked_and_read(server: RawServer, connect: Connect) -> None:
    server.answer = always(200, [{"id": 0, "is_processing": False}])
    assert await connect().slots() == (SlotInfo(SlotId(0), False, None, None, 0),)
    assert server.requests[0].line == "GET /slots HTTP/1.1"


async def test_slots_that_are_no_list_are_not_llama_servers(server: RawServer, connect: Connect) -> None:
    server.answer = always(200, {})
    slots = await connect().slots()
    assert isinstance(slots, Unavailable)
    assert slots.reason is Obstacle.NOT_LLAMA_SERVER


async def test_slots_switched_off_pass_the_servers_advice_on(server: RawServer, connect: Connect) -> None:
    server.answer = always(501, {"error": {"message": "Start it with `--slots`"}})
    assert await connect().slots() == Unavailable(Obstacle.UNSUPPORTED, "Start it with `--slots`")


async def test_model_meta_is_read_and_empty_when_it_cannot_be_had(
    server: RawServer, connect: Connect
) -> None:
    server.answer = always(200, {"data": [{"meta": {"n_vocab": 288}}]})
    assert await connect().model_meta() == {"n_vocab": 288}
    server.answer = always(503, LOADING)
    assert await connect().model_meta() == {}


async def test_a_text_becomes_tokens(server: RawServer, connect: Connect) -> None:
    server.answer = always(200, {"tokens": [7, 8]})
    assert await connect().tokenize("hello") == (7, 8)
    assert server.requests[0].line == "POST /tokenize HTTP/1.1"
    assert server.requests[0].body == b'{"content":"hello"}'


async def test_a_text_becomes_the_tokens_of_a_prompt(server: RawServer, connect: Connect) -> None:
    server.answer = always(200, {"tokens": [1, 7]})
    assert await connect().tokenize("hello", as_prompt=True) == (1, 7)
    assert orjson.loads(server.requests[0].body) == {
        "content": "hello",
        "add_special": True,
        "parse_special": True,
    }


async def test_a_chat_is_rendered_as_it_is_sent(server: RawServer, connect: Connect) -> None:
    server.answer = always(200, {"prompt": "<user>hi"})
    document = {"messages": [{"role": "user", "content": "hi"}], "tools": []}
    assert await connect().apply_template(document) == "<user>hi"
    assert server.requests[0].line == "POST /apply-template HTTP/1.1"
    assert orjson.loads(server.requests[0].body) == document


async def test_a_chat_that_the_template_does_not_accept_is_told_in_its_words(
    server: RawServer, connect: Connect
) -> None:
    server.answer = always(400, {"error": {"message": "roles must alternate"}})
    refused = Unavailable(Obstacle.NOT_LLAMA_SERVER, "roles must alternate")
    assert await connect().apply_template({}) == refused


async def test_a_completion_is_pinned_deterministic_and_as_long_as_asked(
    server: RawServer, connect: Connect
) -> None:
    server.answer = always(200, {"timings": {"prompt_n": 1, "cache_n": 2}})
    assert await connect().complete(SLOT, (5, 6, 7), n_predict=4, timeout=5) == Completed(1, 2)
    assert server.requests[0].line == "POST /completion HTTP/1.1"
    assert orjson.loads(server.requests[0].body) == {
        "prompt": [5, 6, 7],
        "id_slot": 1,
        "cache_prompt": True,
        "n_predict": 4,
        "ignore_eos": True,
        "temperature": 0,
    }


async def test_what_the_model_finds_likely_is_computed_from_the_beginning(
    server: RawServer, connect: Connect
) -> None:
    said = [{"top_logprobs": [{"id": 7, "logprob": -0.5}]}]
    server.answer = always(200, {"timings": {"prompt_n": 1, "cache_n": 0}, "completion_probabilities": said})
    assert await connect().likely_next(SLOT, "hi", top=3, timeout=5) == ((7, -0.5),)
    assert server.requests[0].line == "POST /completion HTTP/1.1"
    assert orjson.loads(server.requests[0].body) == {
        "prompt": "hi",
        "id_slot": 1,
        "cache_prompt": False,
        "n_predict": 1,
        "n_probs": 3,
        "post_sampling_probs": False,
        "temperature": 0,
        "logit_bias": [["a", 1000]],
    }


async def test_no_adapters_are_an_answer_too(server: RawServer, connect: Connect) -> None:
    server.answer = always(200, [])
    assert await connect().adapters() == ()
    assert server.requests[0].line == "GET /lora-adapters HTTP/1.1"


@pytest.mark.parametrize("status", [200, 400])
async def test_what_is_no_answer_to_a_question_is_told(
    server: RawServer, connect: Connect, status: int
) -> None:
    server.answer = always(status, {"error": {"message": "no room"}})
    for answer in (
        await connect().tokenize("hello"),
        await connect().apply_template({}),
        await connect().complete(SLOT, (5,), n_predict=0, timeout=5),
        await connect().likely_next(SLOT, "hi", top=3, timeout=5),
        await connect().adapters(),
    ):
        assert isinstance(answer, Unavailable)
        assert ("no room" in answer.message) == (status == 400)


async def test_actions_are_supported_where_a_bad_name_is_refused(server: RawServer, connect: Connect) -> None:
    server.answer = always(400, INVALID_NAME)
    assert await connect().actions_supported() is None
    assert server.requests[0].line == "POST /slots/0?action=save HTTP/1.1"
    assert server.requests[0].body == b'{"filename":"/"}'


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (200, Fault.FAILED),
        (401, Fault.UNAUTHORIZED),
        (403, Fault.UNAUTHORIZED),
        (404, Fault.UNSUPPORTED),
        (501, Fault.UNSUPPORTED),
        (503, Fault.UNREACHABLE),
        (500, Fault.FAILED),
    ],
)
async def test_why_actions_are_not_supported_is_told(
    server: RawServer, connect: Connect, status: int, fault: Fault
) -> None:
    server.answer = always(status, {"error": {"message": "why"}})
    assert await connect().actions_supported() == ActionFailure(fault, "why", status)


async def test_a_save_names_slot_and_file_and_gives_the_counts(server: RawServer, connect: Connect) -> None:
    server.answer = always(200, SAVED)
    assert await connect().start_save(SLOT, NAME).fate() == Saved(24, 12824, 0.002)
    assert server.requests[0].line == "POST /slots/1?action=save HTTP/1.1"
    assert server.requests[0].body == b'{"filename":"n"}'


async def test_a_restore_gives_the_counts(server: RawServer, connect: Connect) -> None:
    server.answer = always(200, {"id_slot": 1, "n_restored": 24, "n_read": 12824})
    assert await connect().start_restore(SLOT, NAME).wait(5) == Restored(24, 12824, None)
    assert server.requests[0].line == "POST /slots/1?action=restore HTTP/1.1"


async def test_an_erase_gives_the_count(server: RawServer, connect: Connect) -> None:
    server.answer = always(200, {"id_slot": 1, "n_erased": 24})
    assert await connect().start_erase(SLOT).wait(5) == Erased(24)
    assert server.requests[0].line == "POST /slots/1?action=erase HTTP/1.1"


@pytest.mark.parametrize(
    "body", [b"ok", {}, {"id_slot": 1}, SAVED | {"id_slot": 0}, SAVED | {"n_saved": None}, {"n_saved": 1}]
)
async def test_a_save_answered_with_something_else_failed(
    server: RawServer, connect: Connect, body: object
) -> None:
    server.answer = always(200, body)
    outcome = await connect().start_save(SLOT, NAME).fate()
    assert isinstance(outcome, ActionFailure)
    assert outcome.fault is Fault.FAILED


async def test_a_refused_restore_carries_the_servers_words(server: RawServer, connect: Connect) -> None:
    server.answer = always(400, {"error": {"message": "Unable to restore slot: x"}})
    outcome = await connect().start_restore(SLOT, NAME).fate()
    assert outcome == ActionFailure(Fault.REFUSED, "Unable to restore slot: x", 400)


async def test_an_action_goes_on_after_the_wait_for_it_ended(server: RawServer, connect: Connect) -> None:
    may_answer = asyncio.Event()

    async def late(_: RawRequest) -> bytes:
        await may_answer.wait()
        return reply(200, SAVED)

    server.answer = late
    action = connect().start_save(SLOT, NAME)
    assert await action.wait(0.01) == ActionFailure(Fault.TIMED_OUT, "no answer within 0.01 s")
    assert not action.done
    await next_request(server)
    may_answer.set()
    assert await action.fate() == Saved(24, 12824, 0.002)
    assert action.done


async def test_an_action_goes_on_when_the_one_who_waits_is_cancelled(
    server: RawServer, connect: Connect
) -> None:
    action = connect().start_save(SLOT, NAME)
    waiting = asyncio.get_running_loop().create_task(action.wait(60))
    await next_request(server)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert not action.done


async def test_an_action_without_end_is_given_up_at_the_cap_and_hung_up(
    server: RawServer, connect: Connect
) -> None:
    action = connect(action_cap_seconds=0.05).start_save(SLOT, NAME)
    assert await action.fate() == ActionFailure(Fault.TIMED_OUT, "no answer within 0.05 s")
    assert await asyncio.wait_for(server.ended.get(), 5) == 0


async def test_a_server_that_dies_during_an_action_is_unreachable(
    server: RawServer, connect: Connect
) -> None:
    action = connect().start_save(SLOT, NAME)
    await next_request(server)
    server.drop()
    outcome = await action.fate()
    assert isinstance(outcome, ActionFailure)
    assert outcome.fault is Fault.UNREACHABLE


async def test_calls_are_settled_once_all_that_were_under_way_are_over(
    server: RawServer, connect: Connect
) -> None:
    llama = connect()
    assert await llama.settled(5)

    action = llama.start_save(SLOT, NAME)
    assert not await llama.settled(0.05)
    waiting = asyncio.ensure_future(llama.settled(5))
    await next_request(server)
    assert not waiting.done()

    server.drop()
    assert await waiting
    assert action.done


async def test_close_hangs_up_every_action_and_says_its_fate_is_unknown(
    server: RawServer, connect: Connect
) -> None:
    llama = connect()
    actions = [llama.start_save(SLOT, NAME), llama.start_save(SLOT, NAME)]
    for _ in actions:
        await next_request(server)
    await llama.close()
    assert {(await action.fate()) for action in actions} == {
        ActionFailure(Fault.TIMED_OUT, "the management client was closed")
    }
    assert sorted([await server.ended.get(), await server.ended.get()]) == [0, 1]


async def test_a_bug_in_an_action_is_told_to_the_owner_and_to_the_one_who_waits(
    server: RawServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    deaths: list[str] = []
    monkeypatch.setattr(client_module.replies, "parse_saved", broken)
    server.answer = always(200, SAVED)
    action = connect(on_failure=lambda name, _: deaths.append(name)).start_save(SLOT, NAME)
    with pytest.raises(ZeroDivisionError):
        await action.fate()
    assert deaths == ["save slot 1"]


async def test_a_question_that_cannot_be_written_is_not_put(server: RawServer, connect: Connect) -> None:
    nested: object = []
    for _ in range(300):  # more than the writer takes, and fewer than the reader of a client's body does
        nested = [nested]
    prompt = await connect().apply_template({"messages": [], "tools": nested})
    assert prompt == Unavailable(
        Obstacle.UNWRITABLE, "what /apply-template is asked cannot be written: Recursion limit reached"
    )
    assert server.requests == []
