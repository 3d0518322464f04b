"""The request body: read once, whole, within the limit, and understood where it can be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import HttpVersion11, web

from kvproxy.dialects.reading import Reading, read
from kvproxy.errors import ErrorCode, ReplyError
from kvproxy.proxy.rewrite import BOM

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
        message = f"no byte of the request body came for {BODY_STALL_SECONDS:.0f} s"
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
    message = f"the request body is larger than {max_bytes} bytes"
    return ReplyError(ErrorCode.BODY_TOO_LARGE, message, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE.value)


async def understand(body: bytes, label: str, content_encoding: str | None = None) -> Reading | None:
    """What the body says at the endpoint of that label, or None if it is encoded, no JSON, or no object.
    Never raises.

    A large body is parsed in a thread. The parser keeps the interpreter's lock while it works (some 2 to
    4 ms per megabyte), so other streams still feel it; only the loop's own turn ends sooner.
    """
    if content_encoding and content_encoding.strip().lower() != "identity":
        return None
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(_understand, body, label)
    return _understand(body, label)


def _understand(body: bytes, label: str) -> Reading | None:
    document = _parse(body)
    return None if document is None else read(label, document)


def _parse(body: bytes) -> dict[str, Any] | None:
    view = memoryview(body)[len(BOM) :] if body.startswith(BOM) else body
    if body.endswith(b"\0"):  # which llama-server reads as the end of the text
        view = bytes(view).rstrip(b"\0")
    try:
        document = orjson.loads(view)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None
