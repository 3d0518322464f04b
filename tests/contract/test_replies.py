"""What the server tells about itself, and how it refuses."""

from __future__ import annotations

import pytest

from tests.contract.subject import Flags, Subject

UNTOUCHED = {"id", "n_ctx", "speculative", "is_processing"}
USED = UNTOUCHED | {
    "id_task",
    "n_prompt_tokens",
    "n_prompt_tokens_processed",
    "n_prompt_tokens_cache",
    "params",
    "next_token",
}


async def test_health_is_ok_on_both_paths(server: Subject) -> None:
    assert await server.get("/health") == {"status": "ok"}
    assert await server.get("/v1/health") == {"status": "ok"}


async def test_props_tell_slots_context_model_build_and_life(server: Subject) -> None:
    props = await server.get("/props")
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["is_sleeping"] is False
    assert props["endpoint_slots"] is True
    assert props["build_info"].startswith("b")
    assert props["model_ftype"] == "all F32"
    assert props["modalities"]["vision"] is False
    assert "messages" in props["chat_template"]
    assert len(props["media_marker"]) > 20
    assert {"model_path", "model_alias", "bos_token", "eos_token"} <= props.keys()


async def test_models_carry_meta(server: Subject) -> None:
    for path in ("/v1/models", "/models"):
        (model,) = (await server.get(path))["data"]
        assert model["object"] == "model"
        assert {"n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size", "ftype"} <= model[
            "meta"
        ].keys()
        assert model["meta"]["n_ctx"] == 2048


async def test_a_slot_shows_its_task_only_once_it_has_run_one(server: Subject) -> None:
    assert [slot.keys() for slot in await server.slots()] == [UNTOUCHED, UNTOUCHED]
    await server.complete("hello", id_slot=0)
    used, untouched = await server.slots()
    assert used.keys() == USED
    assert untouched.keys() == UNTOUCHED


async def test_an_idle_slot_shows_what_it_holds_and_zeroes_for_the_rest(server: Subject) -> None:
    answer = await server.complete("hello", n_predict=4, id_slot=0)
    slot = (await server.slots())[0]
    assert slot["n_prompt_tokens"] == answer["tokens_evaluated"] + 3
    assert slot["n_prompt_tokens_processed"] == slot["n_prompt_tokens_cache"] == 0
    assert slot["next_token"][0]["n_decoded"] == 0
    assert slot["next_token"][0]["n_remain"] == -1


async def test_a_busy_slot_shows_its_progress(server: Subject) -> None:
    async with server.busy(1):
        first = (await server.slots())[1]
        second = (await server.slots())[1]
    assert first["is_processing"] is True
    assert first["id_task"] == second["id_task"]
    assert 0 < first["next_token"][0]["n_decoded"] <= second["next_token"][0]["n_decoded"]
    assert first["n_prompt_tokens_processed"] > 0


async def test_slots_can_refuse_when_none_is_idle(server: Subject) -> None:
    assert (await server.ask("GET", "/slots?fail_on_no_slot=1")).status == 200
    async with server.busy(0), server.busy(1):
        reply = await server.ask("GET", "/slots?fail_on_no_slot=1")
    assert reply.status == 503
    assert reply.error["type"] == "unavailable_error"


async def test_counting_agrees_with_tokenizing_the_rendered_template(server: Subject) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    rendered = (await server.ask("POST", "/apply-template", {"messages": messages})).json["prompt"]
    counted = await server.ask("POST", "/v1/messages/count_tokens", {"messages": messages, "max_tokens": 1})
    answer = await server.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    also = await server.ask("POST", "/v1/chat/completions/input_tokens", {"messages": messages})
    assert also.json == {**counted.json, "object": "response.input_tokens"}
    assert rendered.count("<|im_start|>") == 3
    assert await server.tokens_of(rendered) == counted.json["input_tokens"]
    assert answer.json["usage"]["prompt_tokens"] == counted.json["input_tokens"]


async def test_special_tokens_are_added_only_when_asked_for(server: Subject) -> None:
    plain = (await server.ask("POST", "/tokenize", {"content": "abc"})).json["tokens"]
    full = (await server.ask("POST", "/tokenize", {"content": "abc", "add_special": True})).json["tokens"]
    assert full[1:] == plain
    assert (await server.ask("POST", "/tokenize", {})).json["tokens"] == []


async def test_lora_adapters_are_a_list(server: Subject) -> None:
    assert await server.get("/lora-adapters") == []


async def test_metrics_count_computed_and_reused_tokens(server: Subject) -> None:
    answer = await server.complete("hello there", id_slot=0)
    text = (await server.ask("GET", "/metrics")).text
    assert f"llamacpp:prompt_tokens_total {answer['timings']['prompt_n']}\n" in text
    assert "llamacpp:prompt_tokens_cached_total 0\n" in text
    assert "llamacpp:requests_deferred 0\n" in text


@pytest.mark.parametrize(
    "request_line", ["GET /nope", "POST /v1/nope", "GET /v1/chat/completions", "PUT /health"]
)
async def test_an_unknown_route_is_not_found(server: Subject, request_line: str) -> None:
    method, path = request_line.split()
    reply = await server.ask(method, path)
    assert reply.status == 404
    assert reply.error == {"message": "File Not Found", "type": "not_found_error", "code": 404}


async def test_options_answers_without_a_body(server: Subject) -> None:
    reply = await server.ask("OPTIONS", "/v1/chat/completions")
    assert (reply.status, reply.text) == (200, "")


@pytest.mark.parametrize("body", ['{"messages":[', '{"x":1}'])
async def test_a_bad_chat_body_is_an_invalid_request(server: Subject, body: str) -> None:
    reply = await server.ask("POST", "/v1/chat/completions", body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("flags", [Flags(api_key="sesame")])
async def test_a_key_is_asked_for_everywhere_but_on_health(server: Subject) -> None:
    server.headers.clear()
    assert (await server.ask("GET", "/health")).status == 200
    for path in ("/props", "/slots", "/metrics", "/v1/models", "/models", "/nope"):
        reply = await server.ask("GET", path)
        assert reply.status == 401, path
        assert reply.error == {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
    assert (await server.act("erase", 0)).status == 401
    assert (await server.ask("POST", "/v1/messages", {})).status == 401


@pytest.mark.parametrize("flags", [Flags(api_key="sesame")])
async def test_a_key_is_read_from_authorization_first(server: Subject) -> None:
    server.headers.clear()
    assert (await server.ask("GET", "/props", Authorization="Bearer sesame")).status == 200
    assert (await server.ask("GET", "/props", **{"X-Api-Key": "sesame"})).status == 200
    both = {"Authorization": "Bearer wrong", "X-Api-Key": "sesame"}
    assert (await server.ask("GET", "/props", **both)).status == 401


async def test_embeddings_are_refused_unless_switched_on(server: Subject) -> None:
    reply = await server.ask("POST", "/v1/embeddings", {"input": "hello"})
    assert reply.status == 501
    assert reply.error["type"] == "not_supported_error"


async def test_probabilities_are_told_of_each_token_and_follow_from_the_prompt_alone(server: Subject) -> None:
    """The native route, with n_probs: what the model finds likely before any sampler."""
    wish = {"n_probs": 4, "id_slot": 0, "cache_prompt": False, "temperature": 0}
    wish["logit_bias"] = [["a", 1000]]
    first = await server.complete("red cat, blue dog", n_predict=2, **wish)
    again = await server.complete("red cat, blue dog", n_predict=2, **wish)
    other = await server.complete("red cat, blue cow", n_predict=2, **wish)
    said = first["completion_probabilities"]
    assert len(said) == first["tokens_predicted"] == 2
    assert {"id", "token", "bytes", "logprob", "top_logprobs"} <= said[0].keys()
    listed = said[0]["top_logprobs"]
    assert [one.keys() for one in listed] == [{"id", "token", "bytes", "logprob"}] * 4
    logprobs = [one["logprob"] for one in listed]
    assert logprobs == sorted(logprobs, reverse=True)
    assert logprobs[0] < 0
    assert again["completion_probabilities"][0] == said[0]
    assert other["completion_probabilities"][0]["top_logprobs"] != listed
    assert "completion_probabilities" not in await server.complete("red cat, blue dog", n_predict=2)
