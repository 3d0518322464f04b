"""How far each route and each body can reach into the server's slots."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.dialects.endpoints import LABELS, Dialect, Reach, classify, refine


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/v1/chat/completions", "chat/completions"),
        ("/chat/completions", "chat/completions"),
        ("/v1/completions", "completions"),
        ("/completions", "completion"),
        ("/completion", "completion"),
        ("/v1/responses", "responses"),
        ("/responses?x=1", "responses"),
        ("/infill", "infill"),
    ],
)
def test_completions_of_every_kind_honour_the_pin(path: str, label: str) -> None:
    endpoint = classify("POST", path)
    assert (endpoint.label, endpoint.reach) == (label, Reach.PINNED)


@pytest.mark.parametrize(
    "path",
    ["/v1/messages", "/v1/messages?beta=true", "/v1/embeddings", "/audio/transcriptions", "/what/ever"],
)
def test_what_ignores_the_pin_floats(path: str) -> None:
    assert classify("POST", path).reach is Reach.FLOATING


@pytest.mark.parametrize("path", ["/rerank", "/v1/reranking", "/v1/systemone", "/predict"])
def test_what_makes_several_tasks_is_exclusive(path: str) -> None:
    assert classify("POST", path).reach is Reach.EXCLUSIVE


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
@pytest.mark.parametrize(
    "path", ["/", "/health", "/v1/models", "/slots", "/v1/chat/completions", "/v1/stream"]
)
def test_only_posts_run_inference(method: str, path: str) -> None:
    assert classify(method, path).reach is Reach.NONE


@pytest.mark.parametrize(
    "path",
    [
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/v1/chat/completions/control",
        "/v1/streams/lookup",
    ],
)
def test_posts_that_only_ask_run_no_inference(path: str) -> None:
    assert classify("POST", path).reach is Reach.NONE


@pytest.mark.parametrize(
    "path", ["/slots/0?action=save", "/slots%2f0", "/props", "/lora-adapters", "/models/load"]
)
def test_management_may_change_any_slot(path: str) -> None:
    endpoint = classify("POST", path)
    assert endpoint.is_management
    assert endpoint.reach is Reach.EXCLUSIVE
    assert not classify("GET", path).is_management


def test_the_path_is_decoded_as_the_server_decodes_it() -> None:
    assert classify("POST", "/complet%69on").reach is Reach.PINNED
    assert classify("POST", "/v1%2Fchat/completions").reach is Reach.PINNED
    assert classify("POST", "/reran%u006B").reach is Reach.EXCLUSIVE
    assert classify("POST", "/rerank#x?y").reach is Reach.EXCLUSIVE
    assert classify("POST", "/reran%u00256B").reach is Reach.FLOATING
    assert classify("POST", "/tokenize%2500").reach is Reach.FLOATING
    assert classify("POST", "/Tokenize").reach is Reach.FLOATING


def test_the_messages_routes_speak_anthropic() -> None:
    spoken = {path: classify("POST", path).dialect for path in ("/v1/messages", "/v1/messages/count_tokens")}
    assert set(spoken.values()) == {Dialect.ANTHROPIC}
    assert classify("POST", "/v1/chat/completions").dialect is Dialect.OPENAI


def test_labels_come_from_a_fixed_list() -> None:
    paths = ("/v1/chat/completions", "/secret/42", "/v1/models", "/slots/9", "/%00", "")
    assert {classify(m, p).label for m in ("GET", "POST", "BREW") for p in paths} <= set(LABELS)


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/completion", {"prompt": "text"}),
        ("/completion", {"prompt": ["text"]}),
        ("/completion", {"prompt": [1, 2, 3]}),
        ("/completion", {"prompt": ["text", 7]}),
        ("/completion", {"prompt": [[1, 2]]}),
        ("/completion", {"prompt": [True, 5]}),
        ("/completion", {"prompt": {"prompt_string": "text"}}),
        ("/completion", {"prompt": "text", "n": 1, "n_cmpl": None}),
        ("/completion", {"prompt": "text", "n": "2"}),
        ("/completion", {"prompt": "text", "input": ["a", "b"]}),
        ("/v1/responses", {"input": [{"role": "user"}, {"role": "assistant"}]}),
        ("/v1/chat/completions", {"messages": [{}, {}], "prompt": ["a", "b"]}),
        ("/v1/embeddings", {"input": "text"}),
        ("/v1/embeddings", {"input": [1, 2, 3]}),
        ("/v1/messages", {"messages": [{}, {}]}),
    ],
)
def test_one_prompt_and_one_answer_reach_one_slot(path: str, document: dict[str, Any]) -> None:
    endpoint = classify("POST", path)
    assert refine(endpoint, document) is endpoint.reach


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/completion", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}),
        ("/completion", {"prompt": [True, "b"]}),
        ("/completion", {"prompt": "text", "n_cmpl": 2}),
        ("/completion", {"prompt": "text", "n": 2.0}),
        ("/v1/chat/completions", {"n": 3}),
        ("/v1/responses", {"n": 2}),
        ("/infill", {"n_cmpl": 2}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/embedding", {"content": [{"content": []}, {"content": []}]}),
        ("/predict", {}),
        ("/custom", {"instances": [{}, {}]}),
        ("/custom", {"n": 2}),
    ],
)
def test_several_prompts_or_answers_may_take_several_slots(path: str, document: dict[str, Any]) -> None:
    assert refine(classify("POST", path), document) is Reach.EXCLUSIVE


def test_a_body_we_cannot_read_cannot_be_pinned() -> None:
    assert refine(classify("POST", "/completion"), None) is Reach.FLOATING
    assert refine(classify("POST", "/v1/messages"), None) is Reach.FLOATING
    assert refine(classify("POST", "/rerank"), None) is Reach.EXCLUSIVE


def test_what_may_hide_several_prompts_takes_all_slots() -> None:
    assert refine(classify("POST", "/completion"), None, may_hide_several=True) is Reach.EXCLUSIVE
    assert refine(classify("POST", "/completion"), {}, may_hide_several=True) is Reach.PINNED
    assert refine(classify("POST", "/tokenize"), None, may_hide_several=True) is Reach.NONE
    transcription = classify("POST", "/v1/audio/transcriptions")
    assert refine(transcription, None, may_hide_several=True) is Reach.FLOATING


def test_a_form_or_a_route_without_inference_stays_what_it_is() -> None:
    assert refine(classify("POST", "/v1/audio/transcriptions"), None) is Reach.FLOATING
    assert refine(classify("POST", "/tokenize"), {"n": 9}) is Reach.NONE
