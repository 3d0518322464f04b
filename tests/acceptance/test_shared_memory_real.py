"""Slots that share one memory (`--kv-unified`, no idle clearing): nothing is sent that has no room."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.acceptance.conftest import Measured, SetStage, Stage
from tests.support.load import CHAT, Answer, Conversation, client, words

pytestmark = pytest.mark.real

ROOM = 4096
FLAGS = ("-c", str(ROOM), "-np", "4", "--kv-unified", "--no-cache-idle-slots")


def trio(words: int, max_tokens: int) -> list[Conversation]:
    """What they say is ignored, and each goes on to its limit."""
    extra = {"ignore_eos": True}
    return [Conversation.about(f"speaker {n}", words, max_tokens=max_tokens, extra=extra) for n in range(3)]


async def most_at_once(stage: Stage, turns: list[asyncio.Task[Answer]]) -> int:
    most = 0
    while not all(turn.done() for turn in turns):
        slots = await stage.llama.slots()
        most = max(most, sum(slot["is_processing"] for slot in slots))
        await asyncio.sleep(0.02)
    return most


async def together(stage: Stage, url: str, talks: list[Conversation]) -> tuple[list[Answer], int]:
    async with client(url) as session:
        turns = [asyncio.ensure_future(talk.turn(session)) for talk in talks]
        most = await most_at_once(stage, turns)
        return [turn.result() for turn in turns], most


async def test_what_fails_together_without_kvproxy_is_answered_in_turn_with_it(
    set_stage: SetStage, measured: Measured
) -> None:
    stage = await set_stage(*FLAGS, is_tapped=False)

    direct, side_by_side = await together(stage, stage.llama.base_url, trio(250, 1200))
    ours, in_turn = await together(stage, stage.url, trio(250, 1200))

    failed, ours_failed = (sum(not answer.prompt for answer in answers) for answers in (direct, ours))
    measured(
        f"{' '.join(FLAGS)}, three that need twice that: {failed} of 3 fail without kvproxy "
        f"({side_by_side} at once), {ours_failed} with it ({in_turn} at once)"
    )
    assert (failed > 1, ours_failed) == (True, 0)


async def test_two_whose_answers_nothing_limits_fail_together_and_are_answered_one_after_the_other(
    set_stage: SetStage, measured: Measured
) -> None:
    stage = await set_stage(*FLAGS)

    async def ask(session: aiohttp.ClientSession, name: str) -> tuple[int, int]:
        said = {"messages": [{"role": "user", "content": f"{name}: {words(name, 20)}"}]}
        body = {**said, "max_tokens": -1, "ignore_eos": True}
        async with session.post(CHAT, json=body, headers={"X-Session-Id": name}) as response:
            usage = (await response.json()).get("usage", {})
            return response.status, usage.get("total_tokens", 0)

    async with client(stage.url) as session:
        answers = await asyncio.gather(ask(session, "one"), ask(session, "other"))

    asked = len([one for one in stage.tap.asked if one.target == CHAT])
    measured(f"two endless answers in a memory of {ROOM}: {asked} requests, (status, tokens) {answers}")
    assert [status for status, _ in answers] == [200, 200]
    assert min(tokens for _, tokens in answers) > ROOM // 2
    assert (asked, stage.kvproxy.events("kv.request.failed")) == (4, [])


async def test_what_fits_runs_side_by_side(set_stage: SetStage) -> None:
    stage = await set_stage(*FLAGS, is_tapped=False)
    answers, most = await together(stage, stage.url, trio(50, 400))
    assert all(answer.computed for answer in answers)
    assert most == 3


async def test_conversations_that_do_not_fit_together_take_turns_unharmed(
    set_stage: SetStage,
) -> None:
    stage = await set_stage(*FLAGS)
    talks = [Conversation.about(f"speaker {n}", 200) for n in range(4)]
    told = []
    async with client(stage.url) as session:
        for turn in range(4):
            for talk in talks:
                answer = await talk.turn(session)
                told.append(answer.outcome)
                assert (answer.status, turn == 0 or answer.reused > answer.computed) == (200, True)
    (server,) = (await stage.kvproxy.status())["servers"]
    assert (server["state"], server["volatile_slots"], server["shared_tokens"]) == ("healthy", False, ROOM)
    assert set(told[len(talks) :]) <= {"resident", "restored"}
    assert stage.kvproxy.events("kv.session.restore.failed") == []
    assert stage.kvproxy.events("kv.snapshot.invalidated") == []


@pytest.mark.parametrize("flags", [("-np", "3"), ("-np", "1")])
async def test_slots_of_their_own_are_known_as_such(set_stage: SetStage, flags: tuple[str, ...]) -> None:
    stage = await set_stage("-c", "12288", *flags)
    (server,) = (await stage.kvproxy.status())["servers"]
    assert server["shared_tokens"] is None
    assert stage.kvproxy.events("kv.backend.shared_memory") == []


async def test_a_slot_that_was_emptied_for_anothers_answer_is_not_called_resident(
    set_stage: SetStage,
) -> None:
    stage = await set_stage(*FLAGS)
    one = Conversation.about("speaker", 200)
    endless = Conversation.about("endless", 20, max_tokens=-1, extra={"ignore_eos": True})
    async with client(stage.url) as session:
        await one.turn(session)
        await stage.kvproxy.flush()
        assert (await endless.turn(session)).status == 200
        held = {slot["id"]: slot.get("n_prompt_tokens") for slot in await stage.llama.slots()}
        assert sorted(n or 0 for n in held.values())[:-1] == [0, 0, 0], "the server emptied the idle ones"
        back = await one.turn(session)
    assert (back.outcome, back.reused > back.computed) == ("restored", True)
    (server,) = (await stage.kvproxy.status())["servers"]
    assert (server["state"], server["volatile_slots"]) == ("healthy", False)
