"""Our HTTP server: aiohttp's, set so that it changes nothing and says no more than it must."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, http_parser, web
from aiohttp.http_exceptions import (
    BadStatusLine,
    HttpProcessingError,
    InvalidURLError,
    LineTooLong,
)

from kvproxy.dialects.endpoints import classify
from kvproxy.errors import ErrorCode, ReplyError, SettingsError
from kvproxy.proxy.envelope import error_response

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

REQUEST_LINE_BYTES = 33_000
"""llama-server takes a URI of 32,768 bytes; method and version come on top."""
HEADER_BYTES = 16 << 10
HEADER_COUNT = 128
IDLE_SECONDS = 75.0
"""A client's pooled connection outlives the usual 60 s of load balancers and SDKs, so they close first."""
HEAD_SECONDS = 60.0
"""As long as the usual proxies wait for the first request of a connection; aiohttp would wait for ever."""
LINGER_SECONDS = 5.0
SHUTDOWN_SECONDS = 0.05
"""After the drain, which is ours and comes before, nothing is worth waiting for. aiohttp spends it twice,
and takes 0 for no limit at all."""

_PROTOCOL: Mapping[str, Any] = {
    "auto_decompress": False,
    "access_log": None,
    "max_line_size": REQUEST_LINE_BYTES,
    "max_field_size": HEADER_BYTES,
    "max_headers": HEADER_COUNT,
    "keepalive_timeout": IDLE_SECONDS,
    "lingering_time": LINGER_SECONDS,
}

log = logging.getLogger(__name__)


def require_c_parser() -> None:
    """Raises SettingsError without aiohttp's C parser: several request smuggling holes were in the other."""
    parser = http_parser.HttpRequestParser
    if parser is http_parser.HttpRequestParserPy:
        raise SettingsError(
            "aiohttp runs without its C parser: unset AIOHTTP_NO_EXTENSIONS, or install its binary wheel"
        )


def create_runner(handler: Handler, *, shutdown_seconds: float = SHUTDOWN_SECONDS) -> web.ServerRunner:
    """A runner whose every request, whatever its path, goes to `handler`. Call inside a running loop.

    A handler is cancelled when its client leaves. What it raises becomes a 500 without a word about it.
    """
    return web.ServerRunner(_Server(_well_formed(handler)), shutdown_timeout=shutdown_seconds)


def _well_formed(handler: Handler) -> Handler:
    """`handler`, spared of what the parser lets through but no server behind us should see."""

    async def checked(request: web.BaseRequest) -> web.StreamResponse:
        if isinstance(request.protocol, _RequestHandler):
            request.protocol.has_asked()
        if request.method == "CONNECT":
            refusal = _answer(request, _invalid(HTTPStatus.METHOD_NOT_ALLOWED, _TUNNEL))
            refusal.headers["Allow"] = _METHODS
            return refusal
        if request.version not in (HttpVersion10, HttpVersion11):
            return _answer(request, _invalid(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, _VERSION))
        if _lacks_host(request):
            return _answer(request, _invalid(HTTPStatus.BAD_REQUEST, _NO_HOST))
        return await handler(request)

    return checked


def _lacks_host(request: web.BaseRequest) -> bool:
    return request.version == HttpVersion11 and not request.headers.get("Host", "").strip()


_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_TUNNEL = "kvproxy opens no tunnels (CONNECT): give its address as the base URL, not as an HTTP proxy"
_VERSION = "kvproxy speaks HTTP/1.0 and HTTP/1.1: send one of these"
_NO_HOST = "a request of HTTP/1.1 needs one Host header that is not empty: send it"
_NO_REQUEST_LINE = (
    "what came does not begin like HTTP/1.1: use http://, not https://, and METHOD /path HTTP/1.1"
)
_BAD_TARGET = "the request's target is no path as HTTP/1.1 has it: percent-encode what is in it"
_MALFORMED = (
    "the request is not well-formed HTTP/1.1: a header field, a length or a chunk of it is malformed, or can "
    "be read in two ways; have the client, or what stands between, send it as RFC 9112 has it"
)
_LONG_TARGET = f"the request line is longer than {REQUEST_LINE_BYTES} bytes: send a shorter path or query"
_LONG_FIELD = f"a header field is longer than {HEADER_BYTES} bytes: send a shorter one"
_MANY_FIELDS = f"the request has more than {HEADER_COUNT} header fields: send fewer"
_BUG = "kvproxy failed at this request, which is a bug: please report what its log says of it"


def _invalid(status: HTTPStatus, message: str) -> ReplyError:
    return ReplyError(ErrorCode.REQUEST_INVALID, message, status=status.value)


def _answer(request: web.BaseRequest, error: ReplyError) -> web.Response:
    """The answer, after which the connection is closed."""
    response = error_response(classify(request.method, request.raw_path).dialect, error)
    response.force_close()
    return response


def _refusal_of(error: BaseException | None) -> ReplyError:
    """What to answer where the HTTP library raised `error`; never a word of what was sent."""
    match error:
        case LineTooLong() if error.args[1] == REQUEST_LINE_BYTES:
            return _invalid(HTTPStatus.REQUEST_URI_TOO_LONG, _LONG_TARGET)
        case LineTooLong():
            return _invalid(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _LONG_FIELD)
        case HttpProcessingError() if "Too many headers" in error.message:
            return _invalid(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _MANY_FIELDS)
        case BadStatusLine():
            return _invalid(HTTPStatus.BAD_REQUEST, _NO_REQUEST_LINE)
        case InvalidURLError():
            return _invalid(HTTPStatus.BAD_REQUEST, _BAD_TARGET)
        case HttpProcessingError() if "Missing 'Host'" in error.message:
            return _invalid(HTTPStatus.BAD_REQUEST, _NO_HOST)
        case HttpProcessingError() | web.RequestPayloadError():
            return _invalid(HTTPStatus.BAD_REQUEST, _MALFORMED)
        case _:
            return ReplyError(ErrorCode.INVARIANT, _BUG, status=HTTPStatus.INTERNAL_SERVER_ERROR.value)


class _Server(web.Server):
    def __init__(self, handler: Handler) -> None:
        super().__init__(handler, handler_cancellation=True)

    def __call__(self) -> web.RequestHandler:
        return _RequestHandler(self, loop=asyncio.get_running_loop(), **_PROTOCOL)


class _RequestHandler(web.RequestHandler):
    _silence: asyncio.TimerHandle | None = None
    """Ends a connection on which nothing is asked."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """uvloop keeps what is written until the end of the loop's turn, unless it is over the high water:
        without this the last byte of each answer would wait for all that we do after it."""
        super().connection_made(transport)
        if isinstance(transport, asyncio.WriteTransport):
            transport.set_write_buffer_limits(high=0)
            self._silence = asyncio.get_running_loop().call_later(HEAD_SECONDS, transport.close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.has_asked()
        super().connection_lost(exc)

    def has_asked(self) -> None:
        """A request came: from here on the connection may rest between two of them."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers for what is no request, and for a handler that failed, and closes the connection.

        aiohttp would log a traceback for each malformed line, and send the line back to whoever wrote it.
        """
        refusal = _refusal_of(exc)
        if refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("request handler failed: %s %s", request.method, request.path, exc_info=exc)
        else:
            log.debug("malformed request from %s: %s", request.remote, type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer had begun; it can only be cut off")
        return _answer(request, refusal)
