"""Our HTTP server: aiohttp's, set so that it changes nothing and says no more than it must."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, http_parser, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from kvproxy.dialects.endpoints import classify
from kvproxy.dialects.errors import error_json
from kvproxy.errors import SettingsError
from kvproxy.proxy.envelope import JSON, SERVER

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
            return _refusal(request, HTTPStatus.METHOD_NOT_ALLOWED)
        if request.version not in (HttpVersion10, HttpVersion11):
            return _refusal(request, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        if _lacks_host(request):
            return _refusal(request, HTTPStatus.BAD_REQUEST)
        return await handler(request)

    return checked


def _lacks_host(request: web.BaseRequest) -> bool:
    return request.version == HttpVersion11 and not request.headers.get("Host", "").strip()


def _refusal(request: web.BaseRequest, status: HTTPStatus) -> web.Response:
    """An answer without a code of ours, after which the connection is closed."""
    dialect = classify(request.method, request.raw_path).dialect
    body = error_json(dialect, status, status.phrase, "")
    response = web.Response(status=status, body=body, headers={"Content-Type": JSON, "Server": SERVER})
    response.force_close()
    return response


def _status_of(error: BaseException | None, otherwise: int) -> HTTPStatus:
    if isinstance(error, LineTooLong):
        is_target = error.args[1] == REQUEST_LINE_BYTES
        return HTTPStatus.REQUEST_URI_TOO_LONG if is_target else _HEADERS_TOO_LARGE
    if isinstance(error, HttpProcessingError):
        return _HEADERS_TOO_LARGE if "Too many headers" in error.message else HTTPStatus.BAD_REQUEST
    if isinstance(error, web.RequestPayloadError):
        return HTTPStatus.BAD_REQUEST
    return HTTPStatus(otherwise)


_HEADERS_TOO_LARGE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE


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
        answer = _status_of(exc, status)
        if answer >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("request handler failed: %s %s", request.method, request.path, exc_info=exc)
        else:
            log.debug("malformed request from %s: %s", request.remote, type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer had begun; it can only be cut off")
        return _refusal(request, answer)
