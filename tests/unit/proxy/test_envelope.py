"""Our own errors, in the caller's dialect."""

from __future__ import annotations

import orjson
import pytest

from kvproxy.dialects.endpoints import Dialect
from kvproxy.errors import CapacityError, ErrorCode, ReplyError, UpstreamError
from kvproxy.proxy.envelope import error_body, error_response

FULL = CapacityError(ErrorCode.QUEUE_FULL, "256 requests wait", status=429, retry_after_seconds=3)


def test_openai_callers_get_an_error_object() -> None:
    body, headers = error_body(Dialect.OPENAI, FULL)
    error = {"message": "256 requests wait", "type": "rate_limit_error", "code": "KV_QUEUE_FULL"}
    assert orjson.loads(body) == {"error": error}
    assert headers["X-KVProxy-Error"] == "KV_QUEUE_FULL"
    assert headers["Retry-After"] == "3"


def test_anthropic_callers_get_a_typed_error() -> None:
    body, _ = error_body(Dialect.ANTHROPIC, FULL)
    error = {"message": "256 requests wait", "type": "rate_limit_error", "code": "KV_QUEUE_FULL"}
    assert orjson.loads(body) == {"type": "error", "error": error}


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (413, "invalid_request_error", "request_too_large"),
        (502, "server_error", "api_error"),
        (503, "unavailable_error", "overloaded_error"),
    ],
)
def test_the_type_says_in_each_dialect_what_the_status_says(status: int, openai: str, anthropic: str) -> None:
    error = ReplyError(ErrorCode.INVARIANT, "m", status=status)
    types = [
        orjson.loads(error_body(dialect, error)[0])["error"]["type"]
        for dialect in (Dialect.OPENAI, Dialect.ANTHROPIC)
    ]
    assert types == [openai, anthropic]


def test_the_answer_has_status_and_json_type_and_no_library_version() -> None:
    response = error_response(Dialect.OPENAI, UpstreamError("gone"))
    assert response.status == 502
    assert response.content_type == "application/json"
    assert response.headers["Server"] == "kvproxy"
    assert "Retry-After" not in response.headers


def test_the_answer_to_a_body_too_large_is_the_last_on_its_connection() -> None:
    error = ReplyError(ErrorCode.BODY_TOO_LARGE, "too large", status=413)
    assert error_response(Dialect.OPENAI, error).keep_alive is False
    assert error_response(Dialect.OPENAI, FULL).keep_alive is None
