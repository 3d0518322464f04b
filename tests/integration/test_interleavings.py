"""Conversations of many kinds, their edits, side calls, cancels and restarts, in any order.

No request is ever answered from another session's content, and all that was computed is what slots of their
own would have computed, and what side calls and restarts explain (see `tests.support.ledger`). By hand, for
longer: `KVPROXY_TEST_WALKS=200`.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvproxy.checkpoint.outcome import CheckpointOutcome, RestoreOutcome
from kvproxy.telemetry.events import (
    BranchBegan,
    CheckpointEnded,
    RestoreEnded,
    ServerReady,
    SessionCold,
    SessionSwitched,
)
from tests.fakes.runs import TAG, Run
from tests.support.clients import OPENINGS, Chat, Kind, Request, Side, words_of
from tests.support.ledger import Ledger, Told
from tests.support.proxy import House, house

WALKS = int(os.environ.get("KVPROXY_TEST_WALKS", "") or 25)
STEPS = 30
CHATS = 5
LONGEST = 24
"""What was said in a conversation before another takes its place under the same id."""
TELLING = (BranchBegan, CheckpointEnded, RestoreEnded, ServerReady, SessionCold, SessionSwitched)


class What(StrEnum):
    TURN = "turn"
    REGENERATE = "regenerate"
    EDIT = "edit"
    GO_BACK = "go back"
    TWICE = "twice"
    TOGETHER = "together"
    SIDE = "side"
    BESIDE = "beside"
    LEAVE_AT_ONCE = "leave at once"
    LEAVE_IN_THE_MIDDLE = "leave in the middle"
    BEGIN_ANEW = "begin anew"
    SERVER_RESTARTS = "server restarts"
    SERVER_DIES_UNDER_WAY = "server dies under way"
    PROXY_RESTARTS = "proxy restarts"
    PROXY_DRAINS = "proxy drains"
    FLUSH = "flush"


@dataclass(frozen=True, slots=True)
class Step:
    what: What
    who: int
    other: int
    words: int
    stream: bool
    side: Side


@dataclass(frozen=True, slots=True)
class Plan:
    slots: int
    kinds: list[Kind]
    openings: list[str]
    steps: list[Step]


_WHO = st.integers(0, CHATS - 1)
_OFTEN = [What.TURN] * 6 + [What.TOGETHER] * 3 + [What.SIDE, What.BESIDE]
STEP = st.builds(
    Step,
    what=st.sampled_from([*_OFTEN, *What]),
    who=_WHO,
    other=_WHO,
    words=st.integers(1, 12),
    stream=st.booleans(),
    side=st.sampled_from(Side),
)
PLAN = st.builds(
    Plan,
    slots=st.integers(1, 3),
    kinds=st.lists(st.sampled_from(Kind), min_size=CHATS, max_size=CHATS),
    openings=st.lists(st.sampled_from(OPENINGS), min_size=CHATS, max_size=CHATS),
    steps=st.lists(STEP, min_size=1, max_size=STEPS),
)


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer that came to its end; `status` 0 if it broke off."""

    tag: str
    request: Request
    status: int = 0
    text: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Walk:
    here: House
    plan: Plan
    ledger: Ledger = field(default_factory=Ledger)
    chats: list[Chat] = field(default_factory=list)
    side_calls: set[str] = field(default_factory=set)
    trace: list[str] = field(default_factory=list)
    _epoch: int | None = None
    """of a server that died, and may not have been missed yet"""
    _count: int = 0
    _runs_seen: int = 0
    _events_seen: int = 0

    def __post_init__(self) -> None:
        self.here.fake.on_save = self.ledger.saved
        self.chats = [
            Chat(kind, self._name("c"), opening, f"id-{n}")
            for n, (kind, opening) in enumerate(zip(self.plan.kinds, self.plan.openings, strict=True))
        ]

    async def run(self) -> None:
        for step in self.plan.steps:
            self.trace.append(f"{step}")
            await _DEEDS[step.what](self, step)
            self._expect(None if not self.here.fake.violations else str(self.here.fake.violations))
            if len(self.chats[step.who].said) > LONGEST:
                await self._begin_anew(step)
        await self.here.proxy.at_rest()
        self._expect(self.ledger.objection_to_files())
        self._expect(self.ledger.objection_to_sum(self.here.fake.runs, self.side_calls))

    # -- what happens ------------------------------------------------------------------------------------

    async def _turn(self, step: Step) -> None:
        await self._all(step, self._asked(step))

    async def _regenerate(self, step: Step) -> None:
        chat = self.chats[step.who]
        await self._all(step, chat.regenerate(stream=step.stream) if chat.said else self._asked(step))

    async def _edit(self, step: Step) -> None:
        chat = self.chats[step.who]
        may = chat.may_edit
        await self._all(step, chat.edit(step.words, stream=step.stream) if may else self._asked(step))

    async def _go_back(self, step: Step) -> None:
        chat = self.chats[step.who]
        may = chat.past is not None
        await self._all(step, chat.go_back(step.words, stream=step.stream) if may else self._asked(step))

    async def _twice(self, step: Step) -> None:
        request = self._asked(step)
        await self._all(step, request, request)

    async def _together(self, step: Step) -> None:
        requests = [self._asked(step)]
        if step.other != step.who:
            requests.append(self.chats[step.other].ask(step.words, stream=not step.stream))
        await self._all(step, *requests)

    async def _side(self, step: Step) -> None:
        await self._all(step, self._side_call(step))

    async def _beside(self, step: Step) -> None:
        await self._all(step, self._asked(step), self._side_call(step))

    async def _leave_at_once(self, step: Step) -> None:
        await self._leave(step, "slow_first_token", 5.0)

    async def _leave_in_the_middle(self, step: Step) -> None:
        await self._leave(step, "token_delay", 0.02)

    async def _begin_anew(self, step: Step) -> None:
        old = self.chats[step.who]
        self.chats[step.who] = Chat(old.kind, self._name("c"), old.opening, old.client)

    async def _server_restarts(self, step: Step) -> None:
        """The request that follows may be the first to notice."""
        await self.here.proxy.at_rest()
        self._epoch = self.here.proxy.runtime.table.epoch
        await self.here.fake.restart()

    async def _server_dies_under_way(self, step: Step) -> None:
        self.here.fake.faults.token_delay = 0.005
        asking = asyncio.gather(self._ask(self._asked(step)), self._ask(self._side_call(step)))
        await asyncio.sleep(0.005 * step.words)
        await self.here.fake.kill()
        heard = await asking
        self.here.fake.faults.token_delay = 0.0
        await self.here.fake.start()
        await self.here.proxy.ready()
        await self.here.proxy.at_rest()
        self._check(heard, is_rough=True)

    async def _proxy_restarts(self, step: Step) -> None:
        await self.here.proxy.at_rest()
        await self.here.proxy.restart()
        await self.here.proxy.ready()
        self._epoch = None
        self.ledger.proxy += 1

    async def _proxy_drains(self, step: Step) -> None:
        await self.here.proxy.drain()
        await self._proxy_restarts(step)

    async def _flush(self, step: Step) -> None:
        await self.here.proxy.admin("POST", "flush")

    # -- requests ----------------------------------------------------------------------------------------

    def _asked(self, step: Step) -> Request:
        return self.chats[step.who].ask(step.words, stream=step.stream)

    def _side_call(self, step: Step) -> Request:
        return step.side.beside(self.chats[step.other], self._name("s"))

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count:03}"

    async def _all(self, step: Step, *requests: Request) -> None:
        self._check(await asyncio.gather(*(self._ask(request) for request in requests)))

    async def _ask(self, request: Request) -> Heard:
        tag = self._tag(request)
        sent = self.here.proxy.client.post(
            request.path, json=request.body, headers={**request.headers, TAG: tag}
        )
        try:
            async with sent as response:
                raw = await response.read()
        except aiohttp.ClientError:
            return Heard(tag, request)
        headers = dict(response.headers)
        is_stream = "event-stream" in headers.get("Content-Type", "")
        text = words_of(raw, is_stream=is_stream) if response.status == 200 else ""
        return Heard(tag, request, response.status, text, headers)

    async def _leave(self, step: Step, fault: str, seconds: float) -> None:
        """After the headers, or a few words more."""
        await self.here.proxy.until(lambda: self.here.proxy.runtime.table.epoch != self._epoch)
        await self.here.proxy.ready()
        request, faults = self.chats[step.who].ask(step.words, stream=True), self.here.fake.faults
        tag = self._tag(request)
        setattr(faults, fault, seconds)
        headers = {**request.headers, TAG: tag}
        async with self.here.proxy.client.post(request.path, json=request.body, headers=headers) as response:
            if fault == "token_delay":
                await response.content.readany()
            session = response.headers.get("X-KVProxy-Session")
            response.close()
        await self.here.proxy.at_rest()
        setattr(faults, fault, 0.0)
        for run in self._new_runs(tag):
            self.ledger.broken_off(request.name, run, session)

    def _tag(self, request: Request) -> str:
        self._count += 1
        tag = f"r{self._count}"
        if request.name.startswith("s"):
            self.side_calls.add(tag)
        return tag

    # -- what is to hold ---------------------------------------------------------------------------------

    def _check(self, heard: list[Heard], *, is_rough: bool = False) -> None:
        events = self.here.proxy.events[self._events_seen :]
        self._events_seen = len(self.here.proxy.events)
        self.trace += [f"    {event}" for event in events if isinstance(event, TELLING)]
        for event in events:
            if isinstance(event, CheckpointEnded) and event.outcome is CheckpointOutcome.PUBLISHED:
                self.ledger.published(event.session, event.tokens)
            if isinstance(event, RestoreEnded) and event.outcome is RestoreOutcome.UNREACHABLE:
                self.ledger.blamed(event.session)
        began = {event.session: event.cause.value for event in events if isinstance(event, BranchBegan)}
        by_tag = {one.tag: one for one in heard}
        last: dict[int, Run] = {}
        for run in self._new_runs(*by_tag):
            if by_tag[run.tag].request.path == "/v1/messages" and run.slot in last:
                self.ledger.overtook(last[run.slot])
            last[run.slot] = run
            self._check_run(by_tag[run.tag], run, began, is_rough=is_rough)
        for one in heard:
            self._expect(None if one.status == 200 or is_rough else f"status {one.status}")
            is_own = f"CANARY-{one.request.name} " * 3
            self._expect(None if is_own.startswith(one.text) else f"{one.request.name} said {one.text!r}")
            chat = next((chat for chat in self.chats if chat.name == one.request.name), None)
            if chat is not None and one.status == 200 and one.text and len(chat.said) % 2:
                chat.heard(one.text)

    def _check_run(self, one: Heard, run: Run, began: dict[str, str], *, is_rough: bool) -> None:
        session = one.headers.get("X-KVProxy-Session")
        told = Told(session, one.headers.get("X-KVProxy-Outcome", ""), began.get(session or ""))
        name = one.request.name
        self.trace.append(
            f"  {name} {one.tag} in {run.slot}: {told}, {run.kept} of {len(run.prompt)}, "
            f"held {len(run.held)}, {one.headers.get('X-KVProxy-Reason')}"
        )
        self._expect(None if run.prompt in one.request.prompts else "another prompt came")
        if is_rough:
            if one.tag not in self.side_calls:
                self.ledger.broken_off(name, run, session)
        elif one.tag in self.side_calls:
            self._expect(self.ledger.side_call(name, told))
        else:
            self._expect(self.ledger.turn(name, run, told))

    def _new_runs(self, *tags: str) -> list[Run]:
        fresh = self.here.fake.runs[self._runs_seen :]
        self._runs_seen += len(fresh)
        return [run for run in fresh if run.tag in tags]

    def _expect(self, objection: str | None) -> None:
        assert objection is None, "\n".join([*self.trace[-80:], str(objection)])


_DEEDS: dict[What, Callable[[Walk, Step], Awaitable[None]]] = {
    what: getattr(Walk, "_" + what.value.replace(" ", "_")) for what in What
}


async def _walk(plan: Plan, path: Path) -> None:
    async with house(path, slots=plan.slots, mix_on_busy=True, http_poll=0.02) as here:
        await Walk(here, plan).run()


@pytest.mark.timeout(3600 if WALKS > 25 else 120)
@settings(
    max_examples=WALKS,
    deadline=None,
    database=None,
    derandomize=WALKS <= 25,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
@given(plan=PLAN)
def test_nobody_gets_anothers_content_and_no_token_is_computed_without_a_cause(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as path:
        asyncio.run(_walk(plan, Path(path)))
