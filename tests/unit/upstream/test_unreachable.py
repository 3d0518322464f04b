from __future__ import annotations

import errno
import socket
import ssl

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from kvproxy.upstream.unreachable import why

REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.1', 8080)")
KEY = ConnectionKey("10.0.0.1", 8080, False, True, None, None, None)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (REFUSED, "connection refused"),
        (OSError(errno.EHOSTUNREACH, "Connect call failed ('10.0.0.1', 8080)"), "no route to host"),
        (socket.gaierror(-2, "Name or service not known"), "name or service not known"),
        (TimeoutError(), "the connection took too long"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "TLS failed: "),
        (aiohttp.ServerDisconnectedError(), "server disconnected"),
        (aiohttp.ClientError(), "ClientError"),
        (OSError("two\nlines"), "two lines"),
    ],
)
def test_the_reason_is_told_in_the_words_of_the_system(error: Exception, words: str) -> None:
    assert why(error).startswith(words)


def test_of_an_answer_that_is_no_http_nothing_is_quoted() -> None:
    info = aiohttp.RequestInfo(URL("http://10.0.0.1"), "GET", CIMultiDictProxy(CIMultiDict()))
    error = aiohttp.ClientResponseError(info, (), status=400, message="Bad status line:\n b'SSH-2.0'")
    assert why(error) == "what it answers is no HTTP"


def test_a_wrapped_error_is_told_as_what_it_wraps() -> None:
    assert why(aiohttp.ClientConnectorError(KEY, REFUSED)) == "connection refused"


def test_a_connection_timeout_of_the_http_library_is_told_alike() -> None:
    error = aiohttp.ConnectionTimeoutError("Connection timeout to host http://10.0.0.1:8080")
    assert why(error) == "the connection took too long"


def test_a_certificate_that_is_not_accepted_is_told_as_such() -> None:
    refused = ssl.SSLCertVerificationError(1, "certificate verify failed")
    assert why(aiohttp.ClientConnectorCertificateError(KEY, refused)).startswith("TLS failed: ")
