"""Which connections are kept for another request, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvproxy.upstream import connections
from kvproxy.upstream.connections import IDLE_SECONDS, Connection, ConnectionPool
from tests.support.clock import FakeClock
from tests.support.front import eventually
from tests.support.raw import RawServer, Wire


async def silent(wire: Wire) -> None:
    await wire.gone()


@asynccontextmanager
async def pooled(clock: FakeClock) -> AsyncIterator[tuple[ConnectionPool, RawServer]]:
    async with RawServer(silent) as server:
        pool = ConnectionPool("127.0.0.1", server.port, None, clock)
        yield pool, server
        await pool.close()


async def one_back(pool: ConnectionPool) -> Connection:
    connection = await pool.connect(1.0)
    pool.give_back(connection)
    return connection


async def test_an_empty_pool_has_nothing_to_give() -> None:
    async with pooled(FakeClock()) as (pool, _):
        assert pool.take() is None


async def test_the_connection_given_back_last_is_taken_first_and_only_once() -> None:
    async with pooled(FakeClock()) as (pool, _):
        first, second = await pool.connect(1.0), await pool.connect(1.0)
        pool.give_back(first)
        pool.give_back(second)
        assert (pool.take(), pool.take(), pool.take()) == (second, first, None)


@pytest.mark.parametrize("seconds", [IDLE_SECONDS, IDLE_SECONDS + 0.1])
async def test_a_connection_is_taken_as_long_as_the_server_surely_keeps_it(seconds: float) -> None:
    clock = FakeClock()
    async with pooled(clock) as (pool, _):
        connection = await one_back(pool)
        clock.advance(seconds)
        assert pool.take() is (connection if seconds <= IDLE_SECONDS else None)


async def test_a_connection_that_nobody_takes_is_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.01)
    clock = FakeClock()
    async with pooled(clock) as (pool, _):
        connection = await one_back(pool)
        clock.advance(1.0)
        await eventually(lambda: not connection.is_connected())


async def test_an_outdated_connection_carries_nothing_more() -> None:
    async with pooled(FakeClock()) as (pool, _):
        waiting, running = await one_back(pool), await pool.connect(1.0)
        pool.outdate()
        assert pool.take() is None
        pool.give_back(running)
        assert pool.take() is None
        assert not waiting.is_connected()


async def test_a_connection_with_something_to_read_is_not_taken() -> None:
    """It can only be a close, or an answer to nothing."""
    async with pooled(FakeClock()) as (pool, server):
        connection = await one_back(pool)
        await eventually(lambda: bool(server.wires))
        server.wires[0].writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        await server.wires[0].writer.drain()
        await asyncio.to_thread(lambda: None)
        assert pool.take() is None
        assert not connection.is_connected()


async def test_no_connection_is_left_when_the_pool_is_closed() -> None:
    async with RawServer(silent) as server:
        pool = ConnectionPool("127.0.0.1", server.port, None, FakeClock())
        idle, running = await one_back(pool), await pool.connect(1.0)
        await pool.close()
        assert not idle.is_connected()
        assert not running.is_connected()


async def test_what_is_written_goes_out_at_once_and_not_when_the_loop_has_time() -> None:
    """uvloop writes at the end of its turn what is below the high water."""
    async with pooled(FakeClock()) as (pool, _):
        connection = await pool.connect(1.0)
        assert isinstance(connection.transport, asyncio.WriteTransport)
        assert connection.transport.get_write_buffer_limits() == (0, 0)
