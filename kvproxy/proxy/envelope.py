"""Errors that kvproxy itself answers, in the words the caller's SDK understands."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import orjson
from aiohttp import web

from kvproxy.errors import ReplyError
from kvproxy.proxy.endpoints import Dialect

ERROR_HEADER = "X-KVProxy-Error"
JSON = "application/json; charset=utf-8"
SERVER = "kvproxy"
"""Names who made the answer; left out, the HTTP library tells its version and Python's."""

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


def error_body(dialect: Dialect, error: ReplyError) -> tuple[bytes, dict[str, str]]:
    """The JSON body, and the headers that belong to it."""
    headers = {"Content-Type": JSON, "Server": SERVER, ERROR_HEADER: error.code.value}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    return error_json(dialect, error.status, error.message, error.code.value), headers


def error_response(dialect: Dialect, error: ReplyError) -> web.Response:
    """The answer; after a body that was not read to its end, the last one on its connection."""
    body, headers = error_body(dialect, error)
    response = web.Response(status=error.status, body=body, headers=headers)
    if error.status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        response.force_close()
    return response


def error_json(dialect: Dialect, status: int, message: str, code: str) -> bytes:
    """The body alone, for an error that has no code of ours."""
    types = _ANTHROPIC_TYPES if dialect is Dialect.ANTHROPIC else _OPENAI_TYPES
    error = {"message": message, "type": types.get(status) or _fallback(dialect, status), "code": code}
    if dialect is Dialect.ANTHROPIC:
        return orjson.dumps({"type": "error", "error": error})
    return orjson.dumps({"error": error})


def _fallback(dialect: Dialect, status: int) -> str:
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return "invalid_request_error"
    return "api_error" if dialect is Dialect.ANTHROPIC else "server_error"
