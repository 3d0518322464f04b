"""What arrives at each end is what the other end sent: bodies, fields, targets, framing."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import random

import pytest

from tests.support.front import Front
from tests.support.raw import RawServer, Script, Wire, connection, fields

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
    b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
)
GET = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"


def post(body: bytes, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *lines, "", ""])
    return head.encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def playing(answer: bytes, *, requests: int = 1) -> Script:
    """A script that reads a request and writes `answer`, as often as asked."""

    async def script(wire: Wire) -> None:
        for _ in range(requests):
            head = await wire.head()
            await wire.exactly(_length(head))
            await wire.send(answer)

    return script


def _length(head: bytes) -> int:
    return next((int(value) for name, value in fields(head) if name.lower() == "content-length"), 0)


async def dechunked(wire: Wire) -> bytes:
    """The body of a chunked answer that ends properly."""
    body = b""
    while size := int(await wire.until(b"\r\n"), 16):
        body += await wire.exactly(size)
        assert await wire.exactly(2) == b"\r\n"
    assert await wire.exactly(2) == b"\r\n"
    return body


async def exchange(answer: bytes, request: bytes = GET) -> tuple[bytes, bytes]:
    """Head and body bytes, framing included, as the client gets them before the connection closes."""
    async with RawServer(playing(answer)) as server, Front(server.url) as front:
        async with connection(front.port) as client:
            await client.send(request.replace(b"Host: h\r\n", b"Host: h\r\nConnection: close\r\n", 1))
            return await client.head(), await client.rest()


async def test_a_stream_is_the_same_bytes_wherever_it_is_cut() -> None:
    text = 'data: {"content":"über \\u00e9 \u2028 日本語 🙂"}\n\n: \n\nevent: x\n\ndata: a\ndata: b\n\n'
    stream = text.encode() * 25

    async def script(wire: Wire) -> None:
        while True:
            head = await wire.head()
            cut = int(head.split(b"/", 2)[1].split()[0])
            await wire.send(STREAM_HEAD + chunk(stream[:cut]))
            await asyncio.sleep(0)
            await wire.send(chunk(stream[cut:]) + b"0\r\n\r\n")

    async with RawServer(script) as server, Front(server.url) as front, connection(front.port) as client:
        for cut in range(1, len(stream)):
            await client.send(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % cut)
            await client.head()
            assert await dechunked(client) == stream


async def test_a_large_answer_is_the_same_bytes() -> None:
    body = random.Random(1).randbytes(8 << 20)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    _, received = await exchange(answer)
    assert hashlib.sha256(received).digest() == hashlib.sha256(body).digest()


async def test_status_and_headers_reach_the_client_before_any_body_byte_exists() -> None:
    go = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.send(STREAM_HEAD)
        await go.wait()
        await wire.send(chunk(b"data: 1\n\n") + b"0\r\n\r\n")

    async with RawServer(script) as server, Front(server.url) as front, connection(front.port) as client:
        await client.send(GET)
        head = await asyncio.wait_for(client.head(), 10)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        go.set()
        assert await dechunked(client) == b"data: 1\n\n"


async def test_a_head_goes_out_with_the_body_that_follows_it_at_once() -> None:
    """llama-server writes the two one after the other, and the client would be woken twice."""
    sockets: list[bytes] = []

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
        await wire.send(b"ok")

    async with RawServer(script) as server, Front(server.url) as front, connection(front.port) as client:
        await client.send(GET)
        sockets.append(await client.reader.read(1 << 16))
    assert sockets[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert sockets[0].endswith(b"\r\n\r\nok")


async def test_a_head_does_not_wait_for_a_body_that_is_late() -> None:
    go = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
        await go.wait()
        await wire.send(b"ok")

    async with RawServer(script) as server, Front(server.url) as front, connection(front.port) as client:
        await client.send(GET)
        assert b"Content-Length: 2" in await asyncio.wait_for(client.head(), 10)
        go.set()
        assert await client.exactly(2) == b"ok"


async def test_each_event_is_passed_on_before_the_next_one_exists() -> None:
    received = asyncio.Semaphore(0)

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.send(STREAM_HEAD)
        for number in range(20):
            await wire.send(chunk(b"data: %d\n\n" % number))
            await received.acquire()
        await wire.send(b"0\r\n\r\n")

    async with RawServer(script) as server, Front(server.url) as front, connection(front.port) as client:
        await client.send(GET)
        await client.head()
        for number in range(20):
            event = chunk(b"data: %d\n\n" % number)
            assert await asyncio.wait_for(client.exactly(len(event)), 10) == event
            received.release()
        assert await client.exactly(5) == b"0\r\n\r\n"


async def test_on_headers_is_called_when_the_head_is_out() -> None:
    called = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.head()
        await wire.send(STREAM_HEAD)
        await wire.gone()

    async with RawServer(script) as server, Front(server.url, on_headers=called.set) as front:
        async with connection(front.port) as client:
            await client.send(GET)
            await asyncio.wait_for(called.wait(), 10)
            await client.head()


async def test_the_head_is_the_upstreams_own_without_hop_fields_and_with_nothing_added() -> None:
    answer = (
        b"HTTP/1.1 299 Odd Reason\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
        b"Set-Cookie: a=1\r\nX-Hop: gone\r\nSet-Cookie: b=2\r\nConnection: X-Hop\r\nset-cookie: a=1\r\n"
        b"Keep-Alive: timeout=5, max=100\r\nContent-Length: 2\r\nX-Empty:\r\n\r\nok"
    )
    async with RawServer(playing(answer)) as server, Front(server.url) as front:
        async with connection(front.port) as client:
            await client.send(GET)
            head = await client.head()
    assert head == (
        b"HTTP/1.1 299 Odd Reason\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
        b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nset-cookie: a=1\r\nContent-Length: 2\r\nX-Empty: \r\n\r\n"
    )


async def test_our_own_response_headers_come_on_top_and_replace_the_upstreams() -> None:
    answer = b"HTTP/1.1 200 OK\r\nx-kvproxy-slot: 9\r\nContent-Length: 0\r\n\r\n"
    own = {"X-KVProxy-Slot": "1", "X-KVProxy-Outcome": "cold"}
    async with RawServer(playing(answer)) as server, Front(server.url, extra_headers=own) as front:
        async with connection(front.port) as client:
            await client.send(GET)
            head = await client.head()
    given = {name.lower(): value for name, value in fields(head)}
    assert given == {"x-kvproxy-slot": "1", "x-kvproxy-outcome": "cold", "content-length": "0"}


async def test_a_request_reaches_the_upstream_as_it_was_but_for_what_a_gateway_owes() -> None:
    body = b'\xef\xbb\xbf{"a":1e3,"a":123456789012345678901234567890,"e":"\\u00e9\xff"}'
    lines = ("X-A: 1", "Connection: x-hop", "X-Hop: 1", "x-a: 2", "Content-Type: application/json", "X-E:")

    async def script(wire: Wire) -> None:
        bodies.append(await server.request(wire))
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    bodies: list[bytes] = []
    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        await client.send(post(body, *lines))
        await client.head()
    assert bodies == [body]
    assert fields(server.heads[0]) == [
        ("Host", f"127.0.0.1:{server.port}"),
        ("Content-Length", str(len(body))),
        ("X-A", "1"),
        ("x-a", "2"),
        ("Content-Type", "application/json"),
        ("X-E", ""),
        ("Via", "1.1 kvproxy"),
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Forwarded-Proto", "http"),
        ("X-Forwarded-Host", "h"),
    ]


@pytest.mark.parametrize(
    "target",
    [
        b"/a%2Fb?x=%20y+z;w",
        b"/a?",
        b"//a/./b/../c",
        b"/%C3%A4?%FC=%e6%97%a5",
        b"/" + b"x" * 30_000 + b"?y",
        b"/?a=b?c",
    ],
)
async def test_the_target_reaches_the_upstream_byte_for_byte(target: bytes) -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        await client.send(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % target)
        assert (await client.head()).startswith(b"HTTP/1.1 200")
    assert server.heads[0].split(b"\r\n")[0] == b"GET %b HTTP/1.1" % target


async def test_the_absolute_form_becomes_the_origin_form() -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        await client.send(b"GET http://h:1/a%2F?b= HTTP/1.1\r\nHost: h:1\r\n\r\n")
        await client.head()
    assert server.heads[0].startswith(b"GET /a%2F?b= HTTP/1.1\r\n")


async def test_compressed_bodies_pass_undecoded_both_ways() -> None:
    packed = gzip.compress(b'{"a":1}' * 100)
    bodies: list[bytes] = []

    async def script(wire: Wire) -> None:
        bodies.append(await server.request(wire))
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
        await wire.send(head + packed)

    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        await client.send(post(packed, "Content-Encoding: gzip"))
        head = await client.head()
        assert await client.exactly(len(packed)) == packed
    assert bodies == [packed]
    assert ("Content-Encoding", "gzip") in fields(server.heads[0])
    assert fields(head) == [("Content-Encoding", "gzip"), ("Content-Length", str(len(packed)))]


@pytest.mark.parametrize(
    ("method", "answer", "expected"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", [("Content-Length", "999")]),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", []),
        (b"GET", b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n", [("X-A", "1")]),
        (b"GET", b'HTTP/1.1 304 Not Modified\r\nETag: "e"\r\n\r\n', [("ETag", '"e"')]),
        (b"GET", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", [("Content-Length", "0")]),
    ],
)
async def test_answers_without_a_body_leave_the_connection_usable(
    method: bytes, answer: bytes, expected: list[tuple[str, str]]
) -> None:
    request = method + b" / HTTP/1.1\r\nHost: h\r\n\r\n"
    async with RawServer(playing(answer, requests=2)) as server, Front(server.url) as front:
        async with connection(front.port) as client:
            for _ in range(2):
                await client.send(request)
                assert fields(await asyncio.wait_for(client.head(), 10)) == expected
    assert server.connections == (2 if b"chunked" in answer else 1)


async def test_interim_answers_end_here() -> None:
    answer = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    head, body = await exchange(answer)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == b"ok"


UNASKED = {
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\nx",
    "a coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    "a coding to the end": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nConnection: close\r\n\r\nx",
}


@pytest.mark.parametrize("answer", UNASKED.values(), ids=UNASKED)
async def test_what_no_client_of_ours_has_asked_for_is_a_502(answer: bytes) -> None:
    head, body = await exchange(answer)
    assert head.startswith(b"HTTP/1.1 502 ")
    assert b"which nobody asked for" in body


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 11\r\n\r\n{"error":1}',
        b'HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer\r\nContent-Length: 11\r\n\r\n{"error":1}',
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\nno!",
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_the_upstreams_own_refusals_pass_untouched(answer: bytes) -> None:
    head, body = await exchange(answer)
    assert head.replace(b"Connection: close\r\n", b"") + body == answer


async def test_an_answer_that_ends_with_the_connection_is_passed_on_in_chunks() -> None:
    head, body = await exchange(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it")
    assert ("Transfer-Encoding", "chunked") in fields(head)
    assert body == chunk(b"all of it") + b"0\r\n\r\n"


@pytest.mark.parametrize("is_kept", [False, True])
async def test_an_http_1_0_client_gets_no_chunks(is_kept: bool) -> None:
    keep = b"Connection: keep-alive\r\n" if is_kept else b""
    async with RawServer(playing(STREAM_HEAD + chunk(b"one") + chunk(b"two") + b"0\r\n\r\n")) as server:
        async with Front(server.url) as front, connection(front.port) as client:
            await client.send(b"GET / HTTP/1.0\r\n" + keep + b"\r\n")
            head = await client.head()
            body = await asyncio.wait_for(client.rest(), 10)
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert not {"Transfer-Encoding", "Connection"} & {name for name, _ in fields(head)}
    assert body == b"onetwo"


async def test_an_http_1_0_client_may_keep_its_connection_when_the_length_is_known() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    async with RawServer(playing(answer, requests=2)) as server, Front(server.url) as front:
        async with connection(front.port) as client:
            for _ in range(2):
                await client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
                assert ("Connection", "keep-alive") in fields(await client.head())
                assert await client.exactly(2) == b"ok"


async def test_a_client_that_asks_to_close_is_told_and_gets_it() -> None:
    head, body = await exchange(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert ("Connection", "close") in fields(head)
    assert body == b"ok"


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def script(wire: Wire) -> None:
        while True:
            path = (await wire.head()).split()[1]
            if path == b"/0":
                await asyncio.sleep(0.05)
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + path)

    async with RawServer(script) as server, Front(server.url) as front, connection(front.port) as client:
        await client.send(b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % n for n in range(5)))
        for number in range(5):
            await client.head()
            assert await client.exactly(2) == b"/%d" % number


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
async def test_an_upgrade_is_not_offered_on_and_the_connection_stays_usable(protocol: str) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    async def script(wire: Wire) -> None:
        for _ in range(2):
            await server.request(wire)
            await wire.send(answer)

    request = f"GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n".encode()
    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        for _ in range(2):
            await client.send(request)
            assert (await asyncio.wait_for(client.head(), 10)).startswith(b"HTTP/1.1 200")
            assert await client.exactly(2) == b"ok"
    assert b"pgrade" not in server.heads[0]
