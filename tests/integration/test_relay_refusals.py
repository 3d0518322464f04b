"""What never reaches the upstream: malformed, oversized and misdirected requests."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest

from kvproxy.proxy.receive import BODY_STALL_SECONDS
from scripts.ports import free_port
from tests.support.front import Front, eventually
from tests.support.raw import RawServer, Wire, connection, fields

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def answering(wire: Wire) -> None:
    head = await wire.head()
    length = next((int(v) for n, v in fields(head) if n.lower() == "content-length"), 0)
    await wire.exactly(length)
    await wire.send(OK)


async def refused(
    request: bytes, *, max_body_bytes: int = 1 << 27, streams: bool = False
) -> tuple[bytes, bytes, int]:
    """Head and body of the answer to `request`, and how many connections the upstream saw."""
    async with (
        RawServer(answering) as server,
        Front(server.url, max_body_bytes=max_body_bytes, streams_bodies=streams) as front,
    ):
        async with connection(front.port) as client:
            await client.send(request)
            head = await asyncio.wait_for(client.head(), 10)
            length = next(int(v) for n, v in fields(head) if n.lower() == "content-length")
            body = await client.exactly(length)
        return head, body, server.connections


def status(head: bytes) -> int:
    return int(head.split()[1])


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"

MALFORMED = {
    "a length beside chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks beside a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "two equal lengths": POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na",
    "a list of lengths": POST + b"Content-Length: 1, 1\r\n\r\na",
    "a signed length": POST + b"Content-Length: +1\r\n\r\na",
    "a negative length": POST + b"Content-Length: -1\r\n\r\na",
    "a length in hex": POST + b"Content-Length: 0x1\r\n\r\na",
    "a length in other digits": POST + "Content-Length: \u0661\r\n\r\na".encode(),
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked not last": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + b"Content-Length : 1\r\n\r\na",
    "a folded field": POST + b"X-A: 1\r\n folded\r\n\r\n",
    "a bare line feed": b"GET / HTTP/1.1\nHost: h\n\n",
    "a bare carriage return": b"GET / HTTP/1.1\r\nHost: h\r\nX: a\rb\r\n\r\n",
    "a null byte in a value": b"GET / HTTP/1.1\r\nHost: h\r\nX: a\x00b\r\n\r\n",
    "a name with a space": b"GET / HTTP/1.1\r\nHost: h\r\nX A: 1\r\n\r\n",
    "a line without a colon": b"GET / HTTP/1.1\r\nHost: h\r\nnonsense\r\n\r\n",
    "an odd version": b"GET / HTTP/1.1.1\r\nHost: h\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nHost: h\r\n\r\n",
    "a raw byte in the target": b"GET /\xff HTTP/1.1\r\nHost: h\r\n\r\n",
    "a lower case method": b"get / HTTP/1.1\r\nHost: h\r\n\r\n",
    "tls on a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\nX: 1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n",
    "an empty host": b"GET / HTTP/1.1\r\nHost: \r\n\r\n",
}


@pytest.mark.parametrize("request_bytes", MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_request_is_a_400_that_closes_and_reaches_nobody(request_bytes: bytes) -> None:
    async with RawServer(answering) as server, Front(server.url) as front:
        async with connection(front.port) as client:
            await client.send(request_bytes)
            answer = await asyncio.wait_for(client.rest(), 10)
    assert status(answer) == 400
    assert answer.count(b" 400 Bad Request\r\n") == 1
    assert server.connections == 0
    assert_names_cause_and_mend(*answer.split(b"\r\n\r\n", 1))


def assert_names_cause_and_mend(head: bytes, body: bytes) -> None:
    error = orjson.loads(body)["error"]
    assert set(error) == {"message", "type", "code"}
    assert error["code"] == "KV_REQUEST_INVALID"
    assert ("X-KVProxy-Error", "KV_REQUEST_INVALID") in fields(head)
    assert ": " in error["message"] or "; " in error["message"]  # what is wrong, then what to do


CAUSES = {
    "tls on a plain port": "use http://, not https://",
    "an odd version": "METHOD /path HTTP/1.1",
    "a raw byte in the target": "percent-encode",
    "no host": "needs one Host header",
    "an empty host": "needs one Host header",
    "two lengths": "a header field, a length or a chunk",
}


@pytest.mark.parametrize(("name", "words"), CAUSES.items(), ids=CAUSES)
async def test_a_malformed_request_is_told_what_was_wrong_with_it(name: str, words: str) -> None:
    _, body, _ = await refused(MALFORMED[name])
    assert words in orjson.loads(body)["error"]["message"]


async def test_what_is_wrong_with_a_request_is_told_in_the_callers_dialect() -> None:
    _, body, _ = await refused(b"POST /v1/messages HTTP/1.1\r\nHost: \r\nContent-Length: 0\r\n\r\n")
    document = orjson.loads(body)
    assert (document["type"], document["error"]["code"]) == ("error", "KV_REQUEST_INVALID")


BAD_CHUNKS = {
    "no size": b"\r\nabc\r\n0\r\n\r\n",
    "a size that is no number": b"xyz\r\nabc\r\n0\r\n\r\n",
    "a signed size": b"+3\r\nabc\r\n0\r\n\r\n",
    "more than it says": b"3\r\nabcd\r\n0\r\n\r\n",
    "a line feed in the extension": b"3;a\nb\r\nabc\r\n0\r\n\r\n",
    "a size with a prefix": b"0x3\r\nabc\r\n0\r\n\r\n",
    "an endless size": b"f" * 40 + b"\r\nabc",
}


@pytest.mark.parametrize("chunks", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
async def test_a_bad_chunk_is_a_400_that_closes_and_reaches_nobody(chunks: bytes) -> None:
    async with RawServer(answering) as server, Front(server.url) as front:
        async with connection(front.port) as client:
            await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
            answer = await asyncio.wait_for(client.rest(), 10)
    assert status(answer) == 400
    assert answer.count(b" 400 Bad Request\r\n") == 1
    assert server.connections == 0
    assert_names_cause_and_mend(*answer.split(b"\r\n\r\n", 1))


async def test_a_refusal_says_nothing_of_the_request_to_the_client_or_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    head, body, _ = await refused(b"GET / HTTP/1.1\r\nHost: h\r\nX-Secret canary: 1\r\n\r\n")
    assert b"canary" not in head + body
    assert orjson.loads(body)["error"]["type"] == "invalid_request_error"
    assert caplog.records == []


async def test_connect_is_not_a_method_here() -> None:
    head, body, connections = await refused(b"CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\n\r\n")
    assert (status(head), connections) == (405, 0)
    assert "POST" in dict(fields(head))["Allow"]
    assert_names_cause_and_mend(head, body)


@pytest.mark.parametrize("line", [b"GET /", b"GET / HTTP/2.0"])
async def test_other_versions_of_the_protocol_are_a_505(line: bytes) -> None:
    head, body, connections = await refused(line + b"\r\nHost: h\r\n\r\n")
    assert (status(head), connections) == (505, 0)
    assert_names_cause_and_mend(head, body)


either_way = pytest.mark.parametrize("streams", [False, True])
"""A body is read whole or passed on as it comes."""


@either_way
async def test_an_announced_body_over_the_limit_is_refused_before_it_is_read(streams: bool) -> None:
    request = POST + b"Content-Length: 11\r\nExpect: 100-continue\r\n\r\n"
    head, body, connections = await refused(request, max_body_bytes=10, streams=streams)
    assert (status(head), connections) == (413, 0)
    assert ("X-KVProxy-Error", "KV_BODY_TOO_LARGE") in fields(head)
    assert orjson.loads(body)["error"]["code"] == "KV_BODY_TOO_LARGE"


@either_way
async def test_a_chunked_body_is_refused_as_soon_as_it_passes_the_limit(streams: bool) -> None:
    request = POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"6\r\nabcdef\r\n" * 2
    head, _, connections = await refused(request, max_body_bytes=10, streams=streams)
    assert (status(head), connections) == (413, int(streams))


@either_way
@pytest.mark.parametrize("rest", [b"", b"3\r\nabc\r\n", b"zz\r\n"], ids=["nothing", "a part", "a bad chunk"])
async def test_a_body_that_stops_coming_is_given_up(
    rest: bytes, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    real, skipped = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + skipped)

    async def script(wire: Wire) -> None:
        await wire.gone()

    async with RawServer(script) as server, Front(server.url, streams_bodies=streams) as front:
        async with connection(front.port) as client:
            await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            await eventually(lambda: front.running == 1 and server.connections == int(streams))
            await client.send(rest)
            await asyncio.sleep(0.02)
            skipped += BODY_STALL_SECONDS
            head = await asyncio.wait_for(client.head(), 10)
        await eventually(lambda: front.running == 0)
    assert status(head) == 408
    assert ("Connection", "close") in fields(head)


@either_way
async def test_a_body_of_exactly_the_limit_is_accepted(streams: bool) -> None:
    request = POST + b"Content-Length: 10\r\n\r\n" + b"x" * 10
    head, _, _ = await refused(request, max_body_bytes=10, streams=streams)
    assert status(head) == 200


async def test_a_refusal_is_in_the_callers_dialect() -> None:
    request = b"POST /v1/messages HTTP/1.1\r\nHost: h\r\nContent-Length: 11\r\n\r\n"
    _, body, _ = await refused(request, max_body_bytes=10)
    document = orjson.loads(body)
    assert (document["type"], document["error"]["type"]) == ("error", "request_too_large")


@either_way
async def test_a_client_that_expects_100_gets_it_and_may_send_10_megabytes(streams: bool) -> None:
    body = b"x" * (10 << 20)
    request = POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with RawServer(answering) as server, Front(server.url, streams_bodies=streams) as front:
        async with connection(front.port) as client:
            await client.send(request)
            assert await asyncio.wait_for(client.head(), 10) == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(body)
            assert status(await asyncio.wait_for(client.head(), 30)) == 200


async def test_expect_is_not_passed_on() -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(OK)

    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        await client.send(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}")
        assert status(await client.head()) == 200
    assert b"Expect" not in server.heads[0]


async def test_a_target_as_long_as_the_servers_own_limit_passes_and_a_longer_one_is_a_414() -> None:
    for length, expected in ((32_768, 200), (40_000, 414)):
        target = b"/" + b"x" * (length - 1)
        head, body, _ = await refused(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % target)
        assert status(head) == expected
        if expected == 414:
            assert_names_cause_and_mend(head, body)


@pytest.mark.parametrize("lines", [b"X-A: " + b"x" * 20_000 + b"\r\n", b"X-A: 1\r\n" * 200])
async def test_fields_too_long_or_too_many_are_a_431(lines: bytes) -> None:
    head, body, connections = await refused(b"GET / HTTP/1.1\r\nHost: h\r\n" + lines + b"\r\n")
    assert (status(head), connections) == (431, 0)
    assert_names_cause_and_mend(head, body)


async def test_a_request_that_comes_back_to_us_is_a_508() -> None:
    via = b"Via: 1.1 kvproxy, 1.1 kvproxy\r\n"
    head, _, connections = await refused(b"GET / HTTP/1.1\r\nHost: h\r\n" + via + b"\r\n")
    assert (status(head), connections) == (508, 0)


async def test_an_upstream_that_is_not_there_is_a_503_to_try_again() -> None:
    async with Front(f"http://127.0.0.1:{free_port()}") as front, connection(front.port) as client:
        await client.send(POST + b"Content-Length: 2\r\n\r\n{}")
        head = await asyncio.wait_for(client.head(), 10)
    assert status(head) == 503
    assert ("Retry-After", "1") in fields(head)


async def test_an_upstream_that_breaks_before_it_answers_is_a_502_and_asked_once() -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)

    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        for _ in range(2):  # the client's connection stays usable
            await client.send(POST + b"Content-Length: 2\r\n\r\n{}")
            head = await asyncio.wait_for(client.head(), 10)
            length = next(int(v) for n, v in fields(head) if n == "Content-Length")
            assert orjson.loads(await client.exactly(length))["error"]["code"] == "KV_BACKEND_UNAVAILABLE"
            assert status(head) == 502
    assert len(server.heads) == 2
