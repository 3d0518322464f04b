"""How a handler waits for results, and how an answer fails on purpose."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.fakes import replies
from tests.fakes.engine import Engine, Event, Task
from tests.fakes.faults import Failure, Faults
from tests.fakes.wire import is_gone, reset


def json_response(data: Any, status: int = 200) -> web.Response:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return web.Response(text=text, status=status, content_type="application/json", charset="utf-8")


def refusal(code: int, message: str) -> web.Response:
    return json_response(replies.error(code, message), code)


@dataclass(slots=True)
class Waiting:
    engine: Engine
    faults: Faults
    ended: asyncio.Event
    """set when this life is over"""

    async def next(
        self, request: web.Request, results: asyncio.Queue[Event], tasks: list[Task], *, keep: bool = False
    ) -> Event | None:
        """The next result; None once the client is found gone, and its tasks are cancelled then.

        Like the original this only looks at the client when no result, of any request, came for a while.
        """
        loop = asyncio.get_running_loop()
        waiting_since = loop.time()
        while True:
            quiet_until = max(self.engine.last_result, waiting_since) + self.faults.http_poll
            try:
                async with asyncio.timeout_at(quiet_until):
                    return await results.get()
            except TimeoutError:
                now = loop.time()
            if now - self.engine.last_result < self.faults.http_poll:
                continue
            waiting_since = now
            if not keep and is_gone(request):
                self.cancel(tasks)
                return None

    def cancel(self, tasks: list[Task]) -> None:
        for task in tasks:
            self.engine.cancel(task)

    async def fail(self, request: web.Request, failure: Failure) -> web.StreamResponse:
        if failure is Failure.ERROR:
            return refusal(500, "planned failure")
        if failure is Failure.HANG:
            await self.ended.wait()
        elif request.transport is not None:
            reset(request.transport)
        return web.Response()

    async def ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.ended.wait()
        except TimeoutError:
            return False
        return True
