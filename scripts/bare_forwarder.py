"""The least that an aiohttp server and an aiohttp client can do with a request: what kvproxy is held against.

    python scripts/bare_forwarder.py UPSTREAM PORT

It keeps no header, reads no body, knows no slot. Nobody should use it.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import uvloop
from aiohttp import web


async def serve(upstream: str, port: int) -> None:
    async with aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()) as session:

        async def forward(request: web.BaseRequest) -> web.StreamResponse:
            data = await request.read()
            headers = {"Content-Type": "application/json"}
            async with session.post(upstream + request.raw_path, data=data, headers=headers) as answer:
                response = web.StreamResponse(
                    status=answer.status, headers={"Content-Type": "application/json"}
                )
                response.content_length = answer.content_length
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        runner = web.ServerRunner(web.Server(forward))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
