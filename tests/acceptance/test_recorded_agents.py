"""What two coding agents were recorded to send, through kvproxy: main conversations with sub-agents and title
calls among them, other sessions beside, and a server that ends before the last request.

What a later request of a main conversation may expect is measured in the same run: the best that any earlier
one leaves for it in a slot that nobody else uses and that never ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.acceptance.conftest import Measured, SetStage, Stage
from tests.support.load import Answer, Conversation, client
from tests.support.real import LlamaServer
from tests.support.recordings import Recorded, Recording, recordings, send

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]

CONTEXT = 25_600
"""Tokens per slot: the longest recorded prompt has 23,819."""
TWO_SLOTS = ("-c", str(2 * CONTEXT), "-np", "2", "--cache-ram", "0")
PRIVATE = ("-c", str(CONTEXT), "-np", "1", "--cache-ram", "0")
LEAST_SHARE = 0.98
OTHERS = 3
"""More than there are slots: after a turn of each, no slot holds anything of the recording."""
A_MOMENT = 0.2
"""As in `test_reuse`."""

AfterRequest = Callable[[Recorded, Answer], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """`private` has, for each later request of the main conversation, how many tokens it reuses in a private
    slot."""

    recording: Recording
    private: list[int]


@pytest.fixture(scope="module", params=recordings(), ids=str)
def case(request: pytest.FixtureRequest, tiny_llama: Path) -> Case:
    recording: Recording = request.param
    return Case(recording, asyncio.run(_private_reuse(tiny_llama, recording.main)))


async def _private_reuse(model: Path, main: list[Recorded]) -> list[int]:
    best = [0] * len(main)
    async with LlamaServer(model, *PRIVATE) as server, client(server.base_url) as session:
        for number, later in enumerate(main):
            for earlier in main[:number]:
                await send(session, earlier, streams=False)
                best[number] = max(best[number], (await send(session, later, streams=False)).reused)
    return best[1:]


async def nothing(one: Recorded, answer: Answer) -> None:
    """What happens after each request when nothing does."""


async def replay(
    session: aiohttp.ClientSession, recording: Recording, *, streams: bool, after: AfterRequest = nothing
) -> list[tuple[Recorded, Answer]]:
    answers = []
    for one in recording.requests:
        answer = await send(session, one, streams=streams)
        assert answer.status == 200
        answers.append((one, answer))
        await after(one, answer)
    return answers


def main_of(recording: Recording, answers: list[tuple[Recorded, Answer]]) -> list[Answer]:
    return [answer for one, answer in answers if recording.is_main(one)]


def told(case: Case, later: list[Answer]) -> str:
    computed = sum(answer.computed for answer in later)
    reused = [answer.reused for answer in later]
    return f"{case.recording}: {reused} reused, {case.private} in a private slot, {computed} computed again"


class Others:
    """Sessions that take a turn each whenever a request of the recording was answered; before its last one
    the server ends and comes back."""

    def __init__(self, session: aiohttp.ClientSession, server: LlamaServer, recording: Recording) -> None:
        self._session = session
        self._server = server
        self._last = recording.requests[-1]
        self._before_last = recording.requests[-2]
        self._talks = [Conversation.about(f"other {number}") for number in range(OTHERS)]

    async def take_turns(self, one: Recorded, answer: Answer) -> None:
        if one is self._last:
            return
        for talk in self._talks:
            assert (await talk.turn(self._session)).status == 200
        if one is self._before_last:
            await asyncio.sleep(A_MOMENT)
            await self._server.restart()


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
async def test_a_main_conversation_outlives_the_server_and_all_who_came_in_between(
    set_stage: SetStage, measured: Measured, case: Case, streams: bool
) -> None:
    stage = await set_stage(*TWO_SLOTS)
    async with client(stage.url) as session:
        others = Others(session, stage.llama, case.recording)
        answers = await replay(session, case.recording, streams=streams, after=others.take_turns)
    first, *later = main_of(case.recording, answers)
    measured(f"others between, a restart before the last, {streams=}: {told(case, later)}")
    assert {answer.outcome for answer in later} == {"restored"}
    assert {session_of(answer) for answer in later} == {session_of(first)}
    for answer, private in zip(later, case.private, strict=True):
        assert answer.reused >= LEAST_SHARE * private


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
async def test_sub_agents_and_titles_cost_the_main_conversation_nothing_of_its_slot(
    set_stage: SetStage, measured: Measured, case: Case, streams: bool
) -> None:
    stage = await set_stage(*TWO_SLOTS)
    main: list[Answer] = []
    homes: list[int | None] = []

    async def look(one: Recorded, answer: Answer) -> None:
        if case.recording.is_main(one):
            main.append(answer)
        if main:
            homes.append(await home_of(stage, main[-1]))

    async with client(stage.url) as session:
        answers = await replay(session, case.recording, streams=streams, after=look)
    first, *later = main
    outcomes = [answer.outcome for answer in main]
    measured(f"nobody beside, {streams=}: {told(case, later)}, {outcomes}")
    if case.recording.is_pinned:
        assert outcomes == ["cold", *["resident"] * len(later)]
        assert len(set(homes)) == 1
    assert {answer.outcome for one, answer in answers if not one.tools} <= {"auxiliary"}
    sub_agents = [answer for one, answer in answers if one.tools and not case.recording.is_main(one)]
    assert session_of(first) not in map(session_of, sub_agents)
    for answer, private in zip(later, case.private, strict=True):
        assert answer.reused >= LEAST_SHARE * private


async def home_of(stage: Stage, answer: Answer) -> int | None:
    """The slot where kvproxy says that the session lives, and all of the prompt really is. None if it had to
    leave, as it may over `/v1/messages`, where the server chooses: then all of it is in a snapshot."""
    await stage.kvproxy.until_slots(lambda slot: slot["state"] in ("idle", "resident"))
    for slot, inside in zip(await stage.kvproxy.slots(), await stage.llama.slots(), strict=True):
        if slot["occupant"] == session_of(answer):
            assert inside["n_prompt_tokens"] >= answer.prompt
            return int(slot["id"])
    (known,) = (await stage.kvproxy.session(session_of(answer)))["sessions"]
    generations = [one for snapshot in known["snapshots"] for one in snapshot["generations"]]
    assert max(one["tokens"] for one in generations if one["valid"]) >= answer.prompt
    return None


def session_of(answer: Answer) -> str:
    return answer.headers["x-kvproxy-session"]


async def test_llama_server_alone_is_measured_for_comparison(
    tiny_llama: Path, measured: Measured, case: Case
) -> None:
    async with LlamaServer(tiny_llama, *TWO_SLOTS) as server, client(server.base_url) as session:
        later = main_of(case.recording, await replay(session, case.recording, streams=True))[1:]
        measured(f"llama-server alone, nobody beside: {told(case, later)}")
        others = Others(session, server, case.recording)
        answers = await replay(session, case.recording, streams=True, after=others.take_turns)
        later = main_of(case.recording, answers)[1:]
        measured(f"llama-server alone, others between, a restart before the last: {told(case, later)}")
