"""Keeps the client of a stream waiting while we hold its request: see `patience` for what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web
from multidict import CIMultiDict

from kvproxy.checkpoint.outcome import Outcome
from kvproxy.dialects.patience import STREAM_HEADERS, Failure, Manner, Patience, manner_of
from kvproxy.errors import ReplyError
from kvproxy.identifiers import ServerName, short
from kvproxy.proxy.call import Call
from kvproxy.proxy.relay import Ending, RelayedResponse
from kvproxy.sessions.session import Session
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Emit, RequestHeld


class BegunResponse(RelayedResponse):
    """A stream that we began. Its client saw a status of 200; `status` is the server's, once it has one."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(status=200, reason="OK", headers=CIMultiDict(headers))
        self.answered: int | None = None

    @property
    def status(self) -> int:
        return super().status if self.answered is None else self.answered


@dataclass(frozen=True, slots=True)
class Watchers:
    """What all vigils of one server share."""

    server: ServerName
    patience: Patience
    tasks: TaskSet
    emit: Emit
    shows_headers: bool


class Vigil:
    """One request's. Costs nothing until the request has to wait (`waits`)."""

    __slots__ = ("_begun", "_call", "_is_over", "_request", "_task", "_timer", "_watchers", "session")

    def __init__(self, watchers: Watchers, request: web.BaseRequest, call: Call) -> None:
        self._watchers = watchers
        self._request = request
        self._call = call
        self.session: Session | None = None
        """Whose request it is, once that is known."""
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun: BegunResponse | None = None
        self._is_over = False

    @property
    def begun(self) -> BegunResponse | None:
        """The answer, if we began it."""
        return self._begun

    def waits(self) -> None:
        """The request is about to wait for something of ours; also the second time."""
        seconds = self._watchers.patience.after_seconds
        if self._timer is None and seconds and not self._is_over and self._call.streams:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._begin)

    def sent(self) -> None:
        """The request is with the server: an answer that we did not begin is the server's to begin."""
        if self._task is None:
            self.end()

    def end(self) -> None:
        """No pulse from here on: the server has spoken, or the request is over."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            # Between two pulses, or in one that is all with the connection: an event is never cut.
            self._task.cancel()

    async def fail(self, failure: Failure) -> BegunResponse:
        """End the answer that we began with an error inside it. The client may be gone by then."""
        self.end()
        begun, manner = self._begun, self._manner()
        assert begun is not None
        assert manner is not None
        begun.answered = failure.status
        try:
            await begun.write(manner.failure(failure))
            await begun.write_eof()
        except ConnectionError:
            begun.break_off(Ending.CLIENT_LEFT)
        return begun

    async def refuse(self, error: ReplyError) -> BegunResponse:
        """The same for an error of ours."""
        return await self.fail(Failure(error.status, error.message, error.code.value))

    def _manner(self) -> Manner | None:
        return manner_of(self._call.endpoint.label, self._request.headers)

    def _begin(self) -> None:
        if (manner := self._manner()) is not None and not self._is_over:
            self._task = self._watchers.tasks.spawn(self._keep(manner), name="keep a client waiting")

    async def _keep(self, manner: Manner) -> None:
        response = BegunResponse({**STREAM_HEADERS, **self._told()})
        try:
            await response.prepare(self._request)
            self._begun = response
            self._tell()
            while True:
                await response.write(manner.pulse)
                await asyncio.sleep(self._watchers.patience.every_seconds)
        except ConnectionError:
            return  # the client left: its request is being cancelled

    def _told(self) -> dict[str, str]:
        if not self._watchers.shows_headers or (self.session is None and self._call.is_anonymous):
            return {}
        told = {"X-KVProxy-Slot": "-", "X-KVProxy-Outcome": Outcome.PENDING.value}
        return told if self.session is None else {**told, "X-KVProxy-Session": short(self.session.key)}

    def _tell(self) -> None:
        key = None if self.session is None else short(self.session.key)
        seconds = self._watchers.patience.after_seconds
        self._watchers.emit(RequestHeld(self._watchers.server, self._call.endpoint.label, key, seconds))
