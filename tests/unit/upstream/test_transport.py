"""The way to the upstream, against servers that misbehave on purpose."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from kvproxy.clock import SystemClock
from kvproxy.errors import UpstreamError
from kvproxy.upstream.transport import LARGE_BODY_BYTES, Transport
from scripts.ports import free_port
from tests.support.clock import FakeClock
from tests.support.raw import RawServer, Script, Wire, fields

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def headers(*pairs: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in pairs]


async def answer(transport: Transport, path: str = "/", body: bytes | None = b"{}") -> bytes:
    response = await transport.send("POST", path, headers(), body)
    return await response.read()


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    """Its server comes later, on the port it already knows."""
    transport = Transport(f"http://127.0.0.1:{free_port()}", SystemClock(), connect_timeout=0.5)
    yield transport
    await transport.close()


def answering(server_of: list[RawServer], requests_per_connection: int = 1000) -> Script:
    async def script(wire: Wire) -> None:
        for _ in range(requests_per_connection):
            await server_of[0].request(wire)
            await wire.send(OK)

    return script


async def serve(server: RawServer) -> Transport:
    return Transport(server.url, SystemClock())


@pytest.mark.parametrize(
    "target",
    [
        "/a%2Fb?x=%20y",
        "/a?",
        "/a??b",
        "/?",
        "//a//b/../c/.",
        "/a;b+c?d=e+f;g",
        "/%zz",
        "/ä?ü=ß",
        "/a#b",
        "*",
        "/" + "x" * 32_000,
    ],
)
async def test_path_and_query_go_byte_for_byte(target: str) -> None:
    async with (server := RawServer(lambda wire: answering([server])(wire))):
        transport = await serve(server)
        await answer(transport, target)
        await transport.close()
    assert server.heads[0].split(b"\r\n")[0] == f"POST {target} HTTP/1.1".encode()


async def test_no_field_is_added_but_host_and_length() -> None:
    async with (server := RawServer(lambda wire: answering([server])(wire))):
        transport = await serve(server)
        await (
            await transport.send("POST", "/", headers(("X-A", "1"), ("x-a", "2"), ("X-B", "")), b"{}")
        ).read()
        await (await transport.send("GET", "/", headers(("X-A", "1")), None)).read()
        await transport.close()
    host = ("Host", f"127.0.0.1:{server.port}")
    assert fields(server.heads[0]) == [host, ("X-A", "1"), ("x-a", "2"), ("X-B", ""), ("Content-Length", "2")]
    assert fields(server.heads[1]) == [host, ("X-A", "1")]


async def test_a_changed_body_gets_its_length_where_the_old_one_stood() -> None:
    async with (server := RawServer(lambda wire: answering([server])(wire))):
        transport = await serve(server)
        given = headers(("content-length", "999"), ("X-A", "1"))
        await (await transport.send("POST", "/", given, b"{}")).read()
        await transport.close()
    assert [pair[1] for pair in fields(server.heads[0])[1:]] == ["2", "1"]
    assert given[0] == (b"content-length", b"999")


async def test_a_large_body_arrives_whole() -> None:
    body = bytes(range(256)) * (LARGE_BODY_BYTES // 256 + 1)
    received: list[bytes] = []

    async def script(wire: Wire) -> None:
        received.append(await server.request(wire))
        await wire.send(OK)

    async with (server := RawServer(script)):
        transport = await serve(server)
        await answer(transport, body=body)
        await transport.close()
    assert received == [body]


async def test_a_body_given_in_pieces_is_sent_in_chunks() -> None:
    received: list[bytes] = []

    async def script(wire: Wire) -> None:
        await server.request(wire)
        received.append(await wire.until(b"0\r\n\r\n"))
        await wire.send(OK)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"three"

    async with (server := RawServer(script)):
        transport = await serve(server)
        response = await transport.send("POST", "/", headers(), pieces())
        await response.read()
        await transport.close()
    assert received == [b"3\r\none\r\n5\r\nthree\r\n0\r\n\r\n"]


async def test_cookies_of_one_answer_are_not_sent_with_the_next_request() -> None:
    async def script(wire: Wire) -> None:
        for _ in range(2):
            await server.request(wire)
            await wire.send(OK.replace(b"\r\n", b"\r\nSet-Cookie: secret=1\r\n", 1))

    async with (server := RawServer(script)):
        transport = Transport(
            f"http://localhost:{server.port}", SystemClock()
        )  # a jar keeps nothing for bare addresses
        await answer(transport)
        await answer(transport)
        await transport.close()
    assert server.connections == 1
    assert not any(b"secret" in head for head in server.heads)


async def test_a_redirect_is_an_answer_and_not_followed() -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")

    async with (server := RawServer(script)):
        transport = await serve(server)
        response = await transport.send("GET", "/", headers(), None)
        await transport.close()
    assert response.status == 302
    assert len(server.heads) == 1


async def test_an_encoded_answer_is_not_decoded() -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(OK.replace(b"\r\n", b"\r\nContent-Encoding: gzip\r\n", 1))

    async with (server := RawServer(script)):
        transport = await serve(server)
        assert await answer(transport) == b"ok"
        await transport.close()


async def test_a_refused_connection_is_a_503_to_try_again(transport: Transport) -> None:
    with pytest.raises(UpstreamError) as caught:
        await answer(transport)
    assert (caught.value.status, caught.value.retry_after_seconds) == (503, 1)
    assert str(caught.value).endswith(" cannot be reached: connection refused")
    assert str(caught.value).startswith("llama-server at http://127.0.0.1:")


async def test_a_connection_that_is_never_accepted_is_a_503_within_the_connect_timeout() -> None:
    with socket.socket() as silent, ExitStack() as fillers:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        _fill_backlog(silent.getsockname(), fillers)
        transport = Transport(
            f"http://127.0.0.1:{silent.getsockname()[1]}", SystemClock(), connect_timeout=0.1
        )
        with pytest.raises(UpstreamError) as caught:
            await answer(transport)
        await transport.close()
    assert (caught.value.status, caught.value.retry_after_seconds) == (503, 1)


def _fill_backlog(address: tuple[str, int], fillers: ExitStack) -> None:
    """Connect until a handshake gets no answer."""
    for _ in range(16):
        filler = fillers.enter_context(socket.socket())
        filler.settimeout(0.05)
        try:
            filler.connect(address)
        except TimeoutError:
            return
    # Without a full backlog there is no connection that hangs, and so nothing to test.
    pytest.skip("this system accepts connections beyond the backlog")


@pytest.mark.parametrize("ending", ["close", "reset", "half_a_head", "no_http"])
async def test_a_break_before_the_headers_is_a_502_and_the_request_is_sent_once(ending: str) -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)
        if ending == "reset":
            wire.reset()
        elif ending == "half_a_head":
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Le")
        elif ending == "no_http":
            await wire.send(b"SSH-2.0-OpenSSH\r\n\r\n")

    async with (server := RawServer(script)):
        transport = await serve(server)
        with pytest.raises(UpstreamError) as caught:
            await answer(transport)
        await transport.close()
    assert caught.value.status == 502
    assert len(server.heads) == 1


async def test_a_connection_is_used_again() -> None:
    async with (server := RawServer(lambda wire: answering([server])(wire))):
        transport = await serve(server)
        for _ in range(5):
            await answer(transport)
        await transport.close()
    assert (server.connections, len(server.heads)) == (1, 5)


async def test_a_pooled_connection_that_the_server_closed_is_replaced_without_an_error() -> None:
    async with (server := RawServer(lambda wire: answering([server], 1)(wire))):
        transport = await serve(server)
        for _ in range(50):
            assert await answer(transport) == b"ok"
            await asyncio.sleep(0)
        await transport.close()
    assert len(server.heads) == 50


async def test_a_close_the_loop_has_not_seen_yet_is_seen_on_the_socket() -> None:
    """The server's close and our next request fall into one turn of the loop."""
    async with (server := RawServer(lambda wire: answering([server])(wire))):
        transport = await serve(server)
        await asyncio.gather(*(answer(transport) for _ in range(8)))
        pooled = len(server.wires)
        for wire in server.wires:
            _shutdown(wire)
        assert await answer(transport) == b"ok"
        await transport.close()
    assert pooled == 8
    assert (server.connections, len(server.heads)) == (9, 9)


def _shutdown(wire: Wire) -> None:
    """FIN at once, past the loop."""
    raw = socket.socket(fileno=socket.dup(wire.writer.get_extra_info("socket").fileno()))
    raw.shutdown(socket.SHUT_RDWR)
    raw.close()


async def test_a_connection_idle_for_long_is_given_up_before_the_server_does_it() -> None:
    """llama-server closes at five seconds; the pool's clock is moved on instead of waiting."""
    clock = FakeClock()
    async with (server := RawServer(lambda wire: answering([server])(wire))):
        transport = Transport(server.url, clock)
        connections = []
        for seconds in (0.0, 2.5, 4.5):
            clock.advance(seconds)
            await answer(transport)
            connections.append(server.connections)
        await transport.close()
    assert connections == [1, 1, 2]


async def test_a_request_that_met_the_close_half_way_is_not_sent_again() -> None:
    """Bytes were written, so nobody knows what the server did with them."""

    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(OK)
        await server.request(wire)
        wire.reset()

    async with (server := RawServer(script)):
        transport = await serve(server)
        await answer(transport)
        with pytest.raises(UpstreamError):
            await answer(transport)
        await transport.close()
    assert (server.connections, len(server.heads)) == (1, 2)


async def test_after_drop_idle_the_next_request_gets_a_new_connection() -> None:
    async with (server := RawServer(lambda wire: answering([server])(wire))):
        transport = await serve(server)
        await asyncio.gather(*(answer(transport) for _ in range(3)))
        before = server.connections
        transport.drop_idle()
        await answer(transport)
        await answer(transport)
        await transport.close()
    assert (before, server.connections) == (3, 4)


async def test_drop_idle_leaves_a_running_request_alone() -> None:
    go = asyncio.Event()

    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(OK[:-1])
        await go.wait()
        await wire.send(OK[-1:])

    async with (server := RawServer(script)):
        transport = await serve(server)
        response = await transport.send("POST", "/", headers(), b"{}")
        transport.drop_idle()
        go.set()
        assert await response.read() == b"ok"
        await transport.close()


async def test_a_response_closed_half_read_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")
        await wire.gone()
        gone.set()

    async with (server := RawServer(script)):
        transport = await serve(server)
        response = await transport.send("POST", "/", headers(), b"{}")
        response.close()
        await asyncio.wait_for(gone.wait(), 5)
        await transport.close()


async def test_many_requests_run_at_once() -> None:
    arrived = asyncio.Semaphore(0)
    go = asyncio.Event()

    async def script(wire: Wire) -> None:
        await server.request(wire)
        arrived.release()
        await go.wait()
        await wire.send(OK)

    async with (server := RawServer(script)):
        transport = await serve(server)
        async with asyncio.TaskGroup() as group:
            for _ in range(120):
                group.create_task(answer(transport))
            for _ in range(120):
                await asyncio.wait_for(arrived.acquire(), 10)
            go.set()
        await transport.close()
    assert server.connections == 120


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\nok\r\n0\r\n\r\n"


@pytest.mark.parametrize("is_in_one_piece", [True, False])
async def test_a_connection_that_carried_a_body_in_chunks_is_not_used_again(is_in_one_piece: bool) -> None:
    """The server hangs up after a stream without announcing it, perhaps when we have written already."""
    head, body = CHUNKED

    async def script(wire: Wire) -> None:
        while True:
            await server.request(wire)
            if is_in_one_piece:
                await wire.send(head + body)
            else:
                await wire.send(head)
                await asyncio.sleep(0.01)
                await wire.send(body)

    async with (server := RawServer(script)):
        transport = await serve(server)
        for _ in range(3):
            assert await answer(transport) == b"ok"
        await transport.close()
    assert (server.connections, len(server.heads)) == (3, 3)
