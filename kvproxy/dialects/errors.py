"""Errors in the words that the caller's SDK understands."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import orjson

from kvproxy.dialects.endpoints import Dialect

_OPENAI_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_json(dialect: Dialect, status: int, message: str, code: str) -> bytes:
    """The body alone."""
    error = {"message": message, "type": kind_of(dialect, status), "code": code}
    if dialect is Dialect.ANTHROPIC:
        return orjson.dumps({"type": "error", "error": error})
    return orjson.dumps({"error": error})


def kind_of(dialect: Dialect, status: int) -> str:
    """The `type` of an error with that HTTP status."""
    types = _ANTHROPIC_TYPES if dialect is Dialect.ANTHROPIC else _OPENAI_TYPES
    return types.get(status) or _fallback(dialect, status)


def _fallback(dialect: Dialect, status: int) -> str:
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return "invalid_request_error"
    return "api_error" if dialect is Dialect.ANTHROPIC else "server_error"
