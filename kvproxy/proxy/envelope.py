"""Errors that kvproxy itself answers, in the words the caller's SDK understands."""

from __future__ import annotations

from http import HTTPStatus

import orjson
from aiohttp import web

from kvproxy.errors import ReplyError
from kvproxy.proxy.endpoints import Dialect
from kvproxy.proxy.error_kinds import kind_of

ERROR_HEADER = "X-KVProxy-Error"
JSON = "application/json; charset=utf-8"
SERVER = "kvproxy"
"""Names who made the answer; left out, the HTTP library tells its version and Python's."""


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
    error = {"message": message, "type": kind_of(dialect, status), "code": code}
    if dialect is Dialect.ANTHROPIC:
        return orjson.dumps({"type": "error", "error": error})
    return orjson.dumps({"error": error})
