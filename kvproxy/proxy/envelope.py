"""Errors that kvproxy itself answers, as HTTP responses."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from kvproxy.dialects.endpoints import Dialect
from kvproxy.dialects.errors import error_json
from kvproxy.errors import ReplyError

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
