"""What each dialect calls an error of a given status."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from kvproxy.proxy.endpoints import Dialect

_OPENAI: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
_ANTHROPIC: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def kind_of(dialect: Dialect, status: int) -> str:
    """The `type` of an error with that HTTP status."""
    kinds = _ANTHROPIC if dialect is Dialect.ANTHROPIC else _OPENAI
    return kinds.get(status) or _fallback(dialect, status)


def _fallback(dialect: Dialect, status: int) -> str:
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return "invalid_request_error"
    return "api_error" if dialect is Dialect.ANTHROPIC else "server_error"
