"""Which slot a request gets, what it reuses there, and where its answer says so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.subject import Flags, Subject

A = "first conversation: " + "abcdefgh" * 20
B = "second conversation: " + "zyxwvuts" * 20
MESSAGES = [{"role": "user", "content": "tell me about " + "llamas" * 10}]


async def test_the_same_prompt_again_computes_one_token(server: Subject) -> None:
    cold = await server.complete(A, id_slot=0)
    warm = await server.complete(A, id_slot=0)
    n_prompt = await server.tokens_of(A)
    assert (cold["timings"]["cache_n"], cold["timings"]["prompt_n"]) == (0, n_prompt)
    assert (warm["timings"]["cache_n"], warm["timings"]["prompt_n"]) == (n_prompt - 1, 1)
    assert warm["tokens_evaluated"] == n_prompt
    assert warm["timings"]["predicted_n"] == warm["tokens_predicted"] == 2


async def test_a_longer_prompt_computes_only_its_new_part(server: Subject) -> None:
    first = await server.complete(A, n_predict=1, id_slot=0)
    longer = await server.complete(A + "@and more@", id_slot=0)
    assert longer["timings"]["cache_n"] == first["tokens_evaluated"]
    assert longer["timings"]["prompt_n"] == longer["tokens_evaluated"] - first["tokens_evaluated"]


async def test_a_shorter_prompt_gives_up_the_rest(server: Subject) -> None:
    await server.complete(A, id_slot=0)
    shorter = await server.complete(A[:60], id_slot=0)
    assert shorter["timings"]["cache_n"] == shorter["tokens_evaluated"] - 1
    assert await server.held(0) == shorter["tokens_evaluated"] + 1


async def test_cache_prompt_false_reuses_nothing(server: Subject) -> None:
    await server.complete(A, id_slot=0)
    assert (await server.complete(A, id_slot=0, cache_prompt=False))["timings"]["cache_n"] == 0


async def test_the_last_of_duplicate_keys_wins(server: Subject) -> None:
    body = '{"prompt":"hello","n_predict":1,"id_slot":0,"id_slot":1,"cache_prompt":true}'
    assert (await server.ask("POST", "/completion", body)).json["id_slot"] == 1


async def test_no_prediction_still_evaluates_the_prompt_into_the_slot(server: Subject) -> None:
    answer = await server.complete(A, n_predict=0, id_slot=0)
    assert answer["tokens_predicted"] == 1
    assert await server.held(0) == answer["tokens_evaluated"]


async def test_a_prompt_may_be_token_ids(server: Subject) -> None:
    tokens = (await server.ask("POST", "/tokenize", {"content": A, "add_special": True})).json["tokens"]
    await server.complete(A, id_slot=0)
    assert (await server.complete(tokens, id_slot=0))["timings"]["cache_n"] == len(tokens) - 1


@pytest.mark.parametrize(("pin", "slot"), [(0, 0), (1, 1), (5, 1), (4, 0), (-2, 0), (-3, 1), (0.7, 0)])
async def test_a_number_pins_and_wraps(server: Subject, pin: float, slot: int) -> None:
    assert (await server.complete(A, id_slot=pin))["id_slot"] == slot


@pytest.mark.parametrize("pin", ["0", None, -1])
async def test_anything_else_is_no_pin(server: Subject, pin: Any) -> None:
    await server.complete(A, id_slot=1)
    assert (await server.complete(A, id_slot=pin))["id_slot"] == 1


async def test_unpinned_takes_the_slot_that_shares_most(server: Subject) -> None:
    await server.complete(A, id_slot=0)
    await server.complete(B, id_slot=1)
    again = await server.complete(A + "more")
    assert again["id_slot"] == 0
    assert again["timings"]["cache_n"] > 150


async def test_unpinned_without_a_match_takes_the_least_recently_used(server: Subject) -> None:
    await server.complete(A, id_slot=0)
    await server.complete(B, id_slot=1)
    assert (await server.complete("@" * 200))["id_slot"] == 0
    assert (await server.complete("%" * 200))["id_slot"] == 1


async def test_unpinned_on_a_fresh_server_takes_the_last_slot(server: Subject) -> None:
    assert (await server.complete(A))["id_slot"] == 1


async def test_unpinned_goes_round_a_busy_slot(server: Subject) -> None:
    await server.complete(A, id_slot=1)
    async with server.busy(1):
        assert (await server.complete(A))["id_slot"] == 0


@pytest.mark.parametrize("flags", [Flags(slots=1)])
async def test_one_slot_serves_everything(server: Subject) -> None:
    await server.complete(A)
    assert (await server.complete(B, id_slot=3))["id_slot"] == 0
    assert len(await server.slots()) == 1


async def test_a_list_of_prompts_runs_on_several_slots(server: Subject) -> None:
    answers = await server.complete([A, B])
    assert {answer["id_slot"] for answer in answers} == {0, 1}
    assert [answer["index"] for answer in answers] == [0, 1]


async def test_two_answers_to_one_prompt_wipe_another_slot(server: Subject) -> None:
    await server.complete(B, id_slot=1)
    body = {"messages": MESSAGES, "n": 2, "max_tokens": 3, "id_slot": 0}
    reply = await server.ask("POST", "/v1/chat/completions", body)
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1]
    assert await server.held(1) == 0


async def test_more_answers_than_slots_are_refused(server: Subject) -> None:
    body = {"messages": MESSAGES, "n": 3, "max_tokens": 3}
    assert (await server.ask("POST", "/v1/chat/completions", body)).status == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context_is_refused_and_the_slot_unchanged(
    server: Subject, stream: bool
) -> None:
    await server.complete(A, id_slot=0)
    held = await server.held(0)
    body = server.body("x" * 2100, 2, id_slot=0, stream=stream)
    reply = await server.ask("POST", "/completion", body)
    assert reply.status == 400
    assert reply.error["type"] == "exceed_context_size_error"
    assert reply.error["n_prompt_tokens"] > reply.error["n_ctx"] == 2048
    assert await server.held(0) == held


async def test_a_prompt_that_fills_the_context_is_one_too_many(server: Subject) -> None:
    overhead = await server.tokens_of("xx") - 2
    full = server.body("x" * (2048 - overhead), 5, id_slot=0)
    assert (await server.ask("POST", "/completion", full)).status == 400
    almost = await server.complete("x" * (2047 - overhead), n_predict=5, id_slot=0)
    assert almost["tokens_predicted"] == 1


async def test_an_answer_ends_where_the_context_does(server: Subject) -> None:
    answer = await server.complete("x" * 2000, n_predict=500, id_slot=0)
    assert answer["stop_type"] == "limit"
    assert answer["truncated"] is True
    assert answer["tokens_evaluated"] + answer["tokens_predicted"] == 2048
    assert await server.held(0) == 2047


async def test_a_chat_answer_tells_usage_and_timings(server: Subject) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "id_slot": 0, "ignore_eos": True}
    await server.ask("POST", "/v1/chat/completions", body)
    answer = (await server.ask("POST", "/v1/chat/completions", body)).json
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == answer["timings"]["cache_n"] == answer["usage"]["prompt_tokens"] - 1
    assert answer["usage"]["completion_tokens"] == answer["timings"]["predicted_n"] == 4


async def test_a_chat_stream_tells_timings_in_its_last_chunk(server: Subject) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "id_slot": 0, "ignore_eos": True, "stream": True}
    reply = await server.ask("POST", "/v1/chat/completions", body)
    assert reply.headers["Content-Type"] == "text/event-stream"
    *chunks, end = reply.events
    assert end == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["timings"]["cache_n"] == 0
    assert all("timings" not in chunk for chunk in chunks[:-1])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_usage_in_a_chat_stream_comes_in_a_chunk_without_choices(server: Subject) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *_, finish, last, end = (await server.ask("POST", "/v1/chat/completions", body)).events
    assert end == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"] == 4
    assert finish["choices"][0]["finish_reason"] == "length"
    assert "timings" not in finish


async def test_progress_is_streamed_when_asked_for(server: Subject) -> None:
    await server.complete(A, n_predict=1, id_slot=0)
    body = server.body(A + "@@@@", 1, id_slot=0, stream=True, return_progress=True)
    events = (await server.ask("POST", "/completion", body)).events
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert progress[0]["cache"] == progress[0]["processed"] == events[-1]["timings"]["cache_n"]
    assert progress[-1]["processed"] == progress[-1]["total"] == events[-1]["tokens_evaluated"]


async def test_a_text_stream_tells_timings_at_its_end(server: Subject) -> None:
    body = {"prompt": A, "max_tokens": 3, "id_slot": 1, "ignore_eos": True, "stream": True}
    *_, last, end = (await server.ask("POST", "/v1/completions", body)).events
    assert end == "[DONE]"
    assert last["object"] == "text_completion"
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["predicted_n"] == last["usage"]["completion_tokens"] == 3


async def test_a_native_stream_ends_without_done(server: Subject) -> None:
    reply = await server.ask("POST", "/completion", server.body(A, 3, id_slot=1, stream=True))
    assert "[DONE]" not in reply.text
    last = reply.events[-1]
    assert last["stop"] is True
    assert last["id_slot"] == 1
    assert last["timings"]["prompt_n"] == last["tokens_evaluated"]


async def test_responses_tell_timings_only_when_streamed(server: Subject) -> None:
    body = {"input": "hello " * 20, "max_output_tokens": 3, "id_slot": 0}
    whole = (await server.ask("POST", "/v1/responses", body)).json
    streamed = await server.ask("POST", "/v1/responses", {**body, "stream": True})
    last = streamed.events[-1]
    assert "timings" not in whole
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert "[DONE]" not in streamed.text
    assert last["type"] == "response.completed"
    assert last["timings"]["cache_n"] == last["response"]["usage"]["input_tokens"] - 1
    assert streamed.events[0]["type"] == "response.created"


async def test_messages_tell_usage_in_their_first_event_and_no_timings(server: Subject) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3}
    whole = (await server.ask("POST", "/v1/messages", body)).json
    streamed = await server.ask("POST", "/v1/messages", {**body, "stream": True})
    assert whole["usage"]["cache_read_input_tokens"] == 0
    assert whole["type"] == "message"
    head = streamed.events[0]
    assert head["type"] == "message_start"
    assert head["message"]["usage"]["input_tokens"] == 1
    assert head["message"]["usage"]["cache_read_input_tokens"] == whole["usage"]["input_tokens"] - 1
    assert streamed.events[-1]["type"] == "message_stop"
    assert "timings" not in streamed.text
    assert "[DONE]" not in streamed.text


async def test_messages_ignore_the_pin(server: Subject) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3}
    await server.ask("POST", "/v1/messages", {**body, "id_slot": 0})
    assert "id_task" not in (await server.slots())[0]
    assert await server.held(1) > 0


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/chat/completions", "/v1/responses", "/v1/completions"]
)
async def test_openai_routes_honour_the_pin(server: Subject, path: str) -> None:
    body = {"messages": MESSAGES, "input": "hello", "prompt": "hello", "max_tokens": 2, "id_slot": 0}
    if "responses" in path:
        del body["messages"]
    assert (await server.ask("POST", path, body)).status == 200
    assert await server.held(0) > 0
    assert await server.held(1) == 0
