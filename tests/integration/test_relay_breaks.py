"""Ends that are no ends: clients that leave or stop reading, upstreams that die, silence that lasts."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.support.front import Front, eventually
from tests.support.raw import RawServer, Wire, connection

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
EVENT = b'data: {"choices":[]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)


@dataclass(slots=True)
class Patience:
    """A stall limit; `waiting` says whether others wait."""

    waiting: bool
    seconds: float = 0.05
    asked: int = 0

    def applies(self) -> bool:
        self.asked += 1
        return self.waiting


def leave_by_fin(wire: Wire) -> None:
    wire.close()


def leave_by_reset(wire: Wire) -> None:
    wire.reset()


leaving = pytest.mark.parametrize("leave", [leave_by_fin, leave_by_reset])


async def abandoned(leave: Callable[[Wire], None], answer: bytes, awaited: bytes) -> Front:
    """A client sends a request, reads `awaited`, and leaves; the upstream would go on for ever."""
    asked, left = asyncio.Event(), asyncio.Event()

    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(answer)
        asked.set()
        await wire.gone()
        left.set()

    async with (server := RawServer(script)), Front(server.url) as front:
        before = len(asyncio.all_tasks())
        async with connection(front.port) as client:
            await client.send(POST)
            await asyncio.wait_for(asked.wait(), 10)
            await client.exactly(len(awaited))
            leave(client)
            await asyncio.wait_for(left.wait(), 10)
        await eventually(lambda: front.running == 0 and len(asyncio.all_tasks()) <= before)
        return front


@leaving
async def test_a_client_that_leaves_before_the_headers_closes_the_upstream(
    leave: Callable[[Wire], None],
) -> None:
    front = await abandoned(leave, b"", b"")
    assert (front.cancelled, front.endings) == (1, [])


@leaving
async def test_a_client_that_leaves_before_the_first_token_closes_the_upstream(
    leave: Callable[[Wire], None],
) -> None:
    front = await abandoned(leave, STREAM_HEAD, b"HTTP/1.1 200 OK\r\n")
    assert (front.cancelled, front.endings) == (1, [])


@leaving
async def test_a_client_that_leaves_mid_stream_closes_the_upstream(leave: Callable[[Wire], None]) -> None:
    front = await abandoned(leave, STREAM_HEAD + CHUNK, STREAM_HEAD + CHUNK)
    assert front.cancelled == 1


@leaving
async def test_a_client_that_leaves_a_plain_answer_closes_the_upstream(leave: Callable[[Wire], None]) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"
    front = await abandoned(leave, answer, answer)
    assert front.cancelled == 1


async def test_a_client_that_leaves_while_it_uploads_costs_the_upstream_nothing() -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)

    async with (server := RawServer(script)), Front(server.url) as front:
        async with connection(front.port) as client:
            await client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\nhalf")
            await eventually(lambda: front.running == 1)
            client.reset()
        await eventually(lambda: front.running == 0)
    assert server.connections == 0


async def test_the_upstream_is_closed_as_soon_as_the_client_is_seen_to_leave_though_it_keeps_writing() -> (
    None
):
    written = 0

    async def script(wire: Wire) -> None:
        nonlocal written
        await server.request(wire)
        await wire.send(STREAM_HEAD)
        while True:
            await wire.send(CHUNK)
            written += 1
            await asyncio.sleep(0)

    async with (server := RawServer(script)), Front(server.url) as front:
        async with connection(front.port) as client:
            await client.send(POST)
            await client.exactly(1000)
        await eventually(lambda: server.wires[0].writer.transport.is_closing())
        await eventually(lambda: front.running == 0)


PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"
BROKEN = {
    "in a chunk": (STREAM_HEAD, CHUNK + CHUNK[:-9]),
    "between chunks": (STREAM_HEAD, CHUNK),
    "after the head": (STREAM_HEAD, b""),
    "in the last chunk": (STREAM_HEAD, CHUNK + b"0\r\n"),
    "in a bad chunk": (STREAM_HEAD + CHUNK, b"zz\r\n" + CHUNK + b"0\r\n\r\n"),
    "short of its length": (PLAIN_HEAD, b"abc"),
}
"""What the upstream sends before and after the client has the head, and then no more."""


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("parts", BROKEN.values(), ids=BROKEN)
async def test_an_answer_that_breaks_is_never_ended_for_the_client(
    parts: tuple[bytes, bytes], is_reset: bool
) -> None:
    received = asyncio.Event()

    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(parts[0])
        await received.wait()
        await wire.send(parts[1])
        if is_reset:
            wire.reset()

    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        await client.send(POST)
        await client.head()
        received.set()
        body = await asyncio.wait_for(client.rest(), 10)
        await eventually(lambda: bool(front.endings))
    assert not body.endswith(b"0\r\n\r\n")
    assert len(body) < 99
    assert front.endings == ["upstream_broke"]
    assert len(server.heads) == 1


async def test_what_came_before_the_break_still_reaches_the_client() -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(STREAM_HEAD + CHUNK * 50)

    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        await client.send(POST)
        await client.head()
        body = await asyncio.wait_for(client.rest(), 10)
    assert body.count(EVENT) == 50


async def test_an_http_1_0_client_sees_a_reset_because_a_close_would_look_complete() -> None:
    received = asyncio.Event()

    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(STREAM_HEAD + CHUNK)
        await received.wait()

    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        await client.head()
        await client.exactly(len(EVENT))
        received.set()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(client.rest(), 10)


# The same breaks are asserted byte by byte above; this one asks what a client in the field makes of them.
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("version", "codes"), [("--http1.1", {18}), ("--http1.0", {18, 56})])
@pytest.mark.parametrize("answer", [STREAM_HEAD + CHUNK, PLAIN_HEAD + b"abc"])
async def test_curl_tells_a_broken_answer_from_a_whole_one(
    answer: bytes, version: str, codes: set[int]
) -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(answer)
        await asyncio.sleep(0.05)

    async with (server := RawServer(script)), Front(server.url) as front:
        command = ("curl", "--silent", "--max-time", "20", "--output", "/dev/null", version, front.url)
        process = await asyncio.create_subprocess_exec(*command)
        assert await process.wait() in codes


async def test_a_connection_that_was_cut_serves_no_request_behind_it() -> None:
    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(STREAM_HEAD + CHUNK)

    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        await client.send(POST + POST)
        answer = await asyncio.wait_for(client.rest(), 10)
    assert answer.count(b"HTTP/1.1") == 1
    assert len(server.heads) == 1


async def test_a_client_that_stops_reading_stops_the_upstream_and_loses_nothing() -> None:
    block = random.Random(7).randbytes(1 << 16)
    blocks = 1024
    written = [0, 0]  # by other connections, by the first

    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (blocks * len(block)))
        for _ in range(blocks):
            await wire.send(block)
            written[wire is server.wires[0]] += 1

    async with (server := RawServer(script)), Front(server.url) as front:
        async with connection(front.port, receive_buffer=1 << 16) as client:
            await client.send(POST)
            await client.head()
            stuck = -1
            while stuck != written[True]:  # until the upstream gets nothing more out
                stuck = written[True]
                await asyncio.sleep(0.1)
            assert stuck < blocks // 2
            await _another_stream_works(front)
            for _ in range(blocks):
                assert await client.exactly(len(block)) == block
            await eventually(lambda: front.endings == ["complete"])


async def _another_stream_works(front: Front) -> None:
    async with connection(front.port) as other:
        await other.send(POST)
        assert (await asyncio.wait_for(other.head(), 10)).startswith(b"HTTP/1.1 200")
        await asyncio.wait_for(other.exactly(1 << 20), 10)


async def cut_offs(patience: Patience, until: Callable[[Front], bool]) -> tuple[int, int]:
    """How many handlers were cancelled for a client that never reads, by when `until` holds, and how many
    of them we said we cut off."""

    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(STREAM_HEAD)
        while True:
            await wire.send(CHUNK * 1000)

    async with (server := RawServer(script)), Front(server.url, stall=patience) as front:
        async with connection(front.port, receive_buffer=1 << 14) as client:
            await client.send(POST)
            await eventually(lambda: until(front))
            return front.cancelled, front.stalled


async def test_a_client_that_stalls_while_others_wait_is_cut_off() -> None:
    assert await cut_offs(Patience(waiting=True), lambda front: front.cancelled == 1) == (1, 1)


async def test_a_client_that_stalls_while_nobody_waits_is_left_alone() -> None:
    patience = Patience(waiting=False)
    assert await cut_offs(patience, lambda _: patience.asked >= 5) == (0, 0)


async def test_a_client_that_reads_is_never_cut_off_however_long_the_upstream_is_silent() -> None:
    patience = Patience(waiting=True, seconds=0.01)
    go = asyncio.Event()

    async def script(wire: Wire) -> None:
        await server.request(wire)
        await wire.send(STREAM_HEAD)
        await go.wait()
        await wire.send(CHUNK + b"0\r\n\r\n")

    async with RawServer(script) as server, Front(server.url, stall=patience) as front:
        async with connection(front.port) as client:
            await client.send(POST)
            await client.head()
            await asyncio.sleep(0.1)
            go.set()
            assert await client.exactly(len(CHUNK) + 5) == CHUNK + b"0\r\n\r\n"
    assert patience.asked == 0


async def test_hours_of_silence_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the headers, between them and the body, and in the body: the loop's clock jumps each time."""
    loop = asyncio.get_running_loop()
    real, skipped = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + skipped)
    steps = asyncio.Semaphore(0)

    async def script(wire: Wire) -> None:
        await server.request(wire)
        for part in (STREAM_HEAD, CHUNK, b":\n\n".join([b"3\r\n", b"\r\n"]), CHUNK, b"0\r\n\r\n"):
            await steps.acquire()
            await wire.send(part)

    async with (server := RawServer(script)), Front(server.url) as front, connection(front.port) as client:
        await client.send(POST)
        await eventually(lambda: len(server.heads) == 1)
        expected = (STREAM_HEAD, CHUNK, b"3\r\n:\n\n\r\n", CHUNK, b"0\r\n\r\n")
        for part in expected:
            skipped += 2 * 3600
            await asyncio.sleep(0.01)  # every timer that is due by now fires
            steps.release()
            assert await client.exactly(len(part)) == part
    assert front.endings == ["complete"]
