"""The request body: read once, whole, within the limit, and understood where it can be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import HttpVersion11, web

from kvproxy.dialects.reading import Reading, read
from kvproxy.errors import ErrorCode, ReplyError
from kvproxy.proxy.rewrite import BOM, can_splice

THREAD_BYTES = 1 << 20
"""Below this parsing takes about a millisecond, less than handing it to a thread and back is worth."""


BODY_STALL_SECONDS = 60.0
"""As long as the usual proxies wait for the next byte of a body."""


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """The body as it was sent, still encoded. Raises ReplyError: 413 as soon as it must be too
    large, 408 if it stops coming."""
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    content = request.content
    if content.is_eof():  # all there, as most bodies are when their head is
        return _within(content.read_nowait(), max_bytes)
    _invite(request)
    return b"".join([piece async for piece in _pieces(request, max_bytes)])


def stream_body(request: web.BaseRequest, max_bytes: int) -> AsyncIterator[bytes] | None:
    """The body in pieces as they come, for a request that needs no understanding; None if it has none.

    Raises ReplyError (413) here for an announced length over the limit; reading raises as `read_body` does.
    """
    if not request.can_read_body:
        return None
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    _invite(request)
    return _pieces(request, max_bytes)


async def _pieces(request: web.BaseRequest, max_bytes: int) -> AsyncIterator[bytes]:
    size = 0
    while piece := await _piece(request):
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        yield piece


async def _piece(request: web.BaseRequest) -> bytes:
    """The next piece; empty at the end. A client that sends nothing, or chunks that are none, which the
    HTTP library tells nobody, is not waited for any longer than this."""
    try:
        async with asyncio.timeout(BODY_STALL_SECONDS):
            return await request.content.readany()
    except TimeoutError:
        message = f"no byte of the request body came for {BODY_STALL_SECONDS:.0f} s: send the request again"
        status = HTTPStatus.REQUEST_TIMEOUT.value
        raise ReplyError(ErrorCode.OPERATION_TIMEOUT, message, status=status) from None


def _invite(request: web.BaseRequest) -> None:
    """Answer `Expect: 100-continue`, which is only done for a body that will be read."""
    expects = request.headers.get("Expect", "").strip().lower() == "100-continue"
    if expects and request.version >= HttpVersion11 and not request.content.is_eof():
        transport = request.transport
        if transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _within(body: bytes, max_bytes: int) -> bytes:
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    return body


def _too_large(max_bytes: int) -> ReplyError:
    message = f"the request body is larger than {max_bytes} bytes: send less, or raise server.max_body_bytes"
    return ReplyError(ErrorCode.BODY_TOO_LARGE, message, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE.value)


async def understand(body: bytes, label: str, content_encoding: str | None = None) -> Reading | None:
    """What the body says at the endpoint of that label, or None if it is encoded, no JSON, or no object.
    Never raises.

    A large body is parsed in a thread. The parser keeps the interpreter's lock while it works (some 2 to
    4 ms per megabyte), so other streams still feel it; only the loop's own turn ends sooner.
    """
    if _is_encoded(content_encoding):
        return None
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(_understand, body, label)
    return _understand(body, label)


FORM = "multipart/form-data"
DEEPEST = 1000
"""Levels of a body that the parser reads at least; llama-server's has no limit."""


def may_hide_several(body: bytes, headers: Mapping[str, str]) -> bool:
    """Whether a body that is not understood may be several prompts to the server, or ask for several answers.
    It makes an object of a form, and an array of a field that comes twice; and it reads a body as it is whose
    encoding it does not know."""
    if headers.get("Content-Type", "").lstrip().lower().startswith(FORM):
        return True
    if not can_splice(body):
        return False
    return _is_encoded(headers.get("Content-Encoding")) or body.count(b"[") + body.count(b"{") > DEEPEST


def _is_encoded(content_encoding: str | None) -> bool:
    return (content_encoding or "identity").strip().lower() != "identity"


def _understand(body: bytes, label: str) -> Reading | None:
    document = _parse(body)
    if document is None:
        return None
    try:
        return read(label, document)
    except RecursionError:  # too deep to be told from others; what it asks for is known all the same
        return read("", document)


def _parse(body: bytes) -> dict[str, Any] | None:
    start, end = len(BOM) if body.startswith(BOM) else 0, body.find(0)  # llama-server takes NUL for the end
    view = memoryview(body)[start : end if end >= 0 else None] if start or end >= 0 else body
    try:
        document = orjson.loads(view)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None
