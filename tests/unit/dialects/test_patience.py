from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.dialects.endpoints import LABELS
from kvproxy.dialects.patience import Failure, failure_of_answer, manner_of

COMMENTED = ("chat/completions", "completions", "completion", "infill")


def parsed(event: bytes) -> tuple[str | None, Any]:
    """Name and data of one server-sent event, which is all there is."""
    assert event.endswith(b"\n\n")
    lines = event.decode().rstrip("\n").split("\n")
    fields = dict(line.split(": ", 1) for line in lines)
    assert set(fields) <= {"event", "data"}
    return fields.get("event"), json.loads(fields["data"])


@pytest.mark.parametrize("label", COMMENTED)
def test_completions_are_kept_waiting_by_a_bare_comment(label: str) -> None:
    manner = manner_of(label, {})
    assert manner is not None
    assert manner.pulse == b":\n\n"


def test_messages_are_kept_waiting_by_the_ping_of_their_dialect() -> None:
    manner = manner_of("messages", {})
    assert manner is not None
    assert parsed(manner.pulse) == ("ping", {"type": "ping"})


def test_responses_are_kept_waiting_by_an_event_of_no_known_type() -> None:
    """One that a reader parses, and that no reader takes for the beginning of a response."""
    manner = manner_of("responses", {})
    assert manner is not None
    name, data = parsed(manner.pulse)
    assert (name, data) == ("keepalive", {"type": "keepalive"})


def test_an_official_library_hears_only_comments_before_a_response_is_created() -> None:
    manner = manner_of("responses", {"x-stainless-lang": "python"})
    assert manner is not None
    assert manner.pulse == b":\n\n"


def test_no_pulse_begins_as_the_ping_that_ends_a_stream_for_some() -> None:
    manners = [manner for label in LABELS if (manner := manner_of(label, {})) is not None]
    assert len(manners) == 6
    assert not any(line.startswith(b": ping") for m in manners for line in m.pulse.splitlines())


@pytest.mark.parametrize("label", sorted(set(LABELS) - {*COMMENTED, "messages", "responses"}))
def test_where_no_stream_is_known_nothing_is_sent(label: str) -> None:
    assert manner_of(label, {}) is None


def test_a_page_of_another_origin_is_left_to_the_servers_own_headers() -> None:
    here = {"Host": "127.0.0.1:8090", "Origin": "http://127.0.0.1:8090"}
    assert manner_of("chat/completions", here) is not None
    assert manner_of("chat/completions", {**here, "Origin": "https://chat.example"}) is None
    assert manner_of("chat/completions", {**here, "Origin": "null"}) is None


FAILED = Failure(503, "no slot came free within 600 s", "KV_QUEUE_TIMEOUT")


def told(label: str, failure: Failure) -> tuple[str | None, Any]:
    manner = manner_of(label, {})
    assert manner is not None
    return parsed(manner.failure(failure))


def test_a_failure_is_told_in_the_words_of_the_openai_api() -> None:
    name, data = told("chat/completions", FAILED)
    assert name is None
    assert data == {
        "error": {"message": FAILED.message, "type": "unavailable_error", "code": "KV_QUEUE_TIMEOUT"}
    }


def test_a_failure_is_told_in_the_words_of_the_messages_api() -> None:
    name, data = told("messages", FAILED)
    assert name == "error"
    assert data == {"type": "error", "error": {"type": "overloaded_error", "message": FAILED.message}}


def test_a_failure_is_told_as_a_failed_response() -> None:
    name, data = told("responses", FAILED)
    assert name == data["type"] == "response.failed"
    assert data["response"]["status"] == "failed"
    assert data["response"]["error"] == {"code": "KV_QUEUE_TIMEOUT", "message": FAILED.message}


def test_the_servers_own_words_are_kept() -> None:
    body = {"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error", "n_ctx": 9}}
    failure = failure_of_answer(400, json.dumps(body).encode())
    assert failure == Failure(400, "too long", "", "exceed_context_size_error")
    assert told("completion", failure)[1]["error"] == {
        "message": "too long",
        "type": "exceed_context_size_error",
        "code": 400,
    }
    assert told("messages", failure)[1]["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error":7}', b'{"choices":[]}'])
def test_an_answer_that_says_nothing_of_an_error_is_told_by_its_status(body: bytes) -> None:
    assert "502" in failure_of_answer(502, body).message


def test_an_error_that_is_a_mere_string_is_told() -> None:
    assert failure_of_answer(500, b'{"error":"busy"}') == Failure(500, "busy")
