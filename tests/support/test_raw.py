from __future__ import annotations

import asyncio

from tests.support.front import eventually
from tests.support.raw import RawServer, Wire, connection


async def test_a_server_ends_well_after_a_connection_that_was_closed_with_bytes_still_to_send() -> None:
    """Such a transport forgets its loop once the last byte is out."""
    size = 1 << 24
    closing = asyncio.Event()

    async def script(wire: Wire) -> None:
        wire.writer.write(bytes(size))
        wire.close()
        closing.set()

    async with RawServer(script) as server:
        async with connection(server.port) as client:
            await closing.wait()
            assert len(await client.rest()) == size
            await eventually(lambda: server.wires[0].writer.transport.get_write_buffer_size() == 0)
