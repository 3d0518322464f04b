"""A server with default flags: whenever it launches a request, it clears every slot in which nothing runs."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvproxy.checkpoint.outcome import CheckpointOutcome
from kvproxy.proxy import pinned
from kvproxy.telemetry.events import (
    CheckpointEnded,
    CheckpointStarted,
    Event,
    VolatileSlotsSeen,
)
from tests.support.proxy import house
from tests.support.talk import Answer, Talk

VOLATILE = {"slots": 4, "volatile": True}


def is_wrong(answer: Answer) -> bool:
    """Whether it was said to go on from something, and was computed."""
    return answer.outcome in ("resident", "restored") and answer.reused < answer.computed


async def test_it_is_found_out_before_anybody_is_served_said_once_and_the_flag_named(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE) as here:
        (server,) = (await here.proxy.status())["servers"]
        assert (server["state"], server["volatile_slots"]) == ("degraded", True)
        assert server["persistence"]["mode"] == "plain"
        assert "-np" in server["reason"]
        assert [slot.tokens for slot in here.fake.slots] == [[], [], [], []]
        await here.proxy.turn(Talk("alpha"))
        assert len(here.proxy.heard(VolatileSlotsSeen)) == 1


async def test_conversations_that_take_turns_lose_nothing_from_the_first_switch_on(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE) as here:
        talks = [Talk(name) for name in ("alpha", "beta", "gamma")]
        for talk in talks:
            assert (await here.proxy.turn(talk)).told == ("cold", "new-session")
        for talk in talks * 2:
            answer = await here.proxy.turn(talk)
            assert answer.told == ("restored", None)
            assert answer.reused > answer.computed


async def test_as_long_as_nothing_else_runs_a_conversation_stays_in_its_slot(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE) as here:
        a = Talk("alpha")
        first = await here.proxy.turn(a)
        second = await here.proxy.turn(a)
        assert (second.told, second.slot) == (("resident", None), first.slot)
        await here.proxy.at_rest()
        assert [verb for verb, _ in here.deeds] == ["save", "save"]


async def test_what_was_answered_survives_the_server(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE) as here:
        talks = [Talk(f"t{n}") for n in range(5)]
        for _ in range(2):
            for talk in talks:
                await here.proxy.turn(talk)
        await here.proxy.at_rest()
        await here.fake.restart()
        for talk in talks:
            answer = await here.proxy.turn(talk)
            assert answer.told == ("restored", None)
            assert answer.reused > 2 * answer.computed
        assert len(here.proxy.heard(VolatileSlotsSeen)) == 2


async def test_several_run_at_once_and_nobody_gets_anothers_words(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE, token_delay=0.005, mix_on_busy=True) as here:
        most = 0

        async def talk_on(number: int) -> list[Answer]:
            nonlocal most
            chance, talk = random.Random(number), Talk(f"t{number}", predict=30)
            answers = []
            for _ in range(5):
                await asyncio.sleep(chance.random() / 50)
                answers.append(await here.proxy.turn(talk))
                most = max(most, 1 + len(here.processing))
            return answers

        everyone = await asyncio.gather(*(talk_on(n) for n in range(6)))
        assert {answer.status for answers in everyone for answer in answers} == {200}
        assert not any(is_wrong(answer) for answers in everyone for answer in answers)
        later = [answer for answers in everyone for answer in answers[1:]]
        assert sum(a.reused for a in later) > 0.5 * sum(a.reused + a.computed for a in later)
        assert most > 2
        assert here.fake.max_concurrent_on_slot == 1


async def test_unpinned_requests_go_in_between(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE, token_delay=0.003, mix_on_busy=True) as here:
        talks = [Talk(f"t{n}", predict=8) for n in range(3)]

        async def disturb() -> None:
            for number in range(6):
                body = {"messages": [{"role": "user", "content": f"note {number}"}], "max_tokens": 4}
                assert (await here.proxy.post("/v1/messages", body)).status == 200
                await asyncio.sleep(0.01)

        async def talk_on(talk: Talk) -> list[Answer]:
            return [await here.proxy.turn(talk) for _ in range(4)]

        *everyone, _ = await asyncio.gather(*(talk_on(talk) for talk in talks), disturb())
        assert not any(is_wrong(answer) for answers in everyone for answer in answers or ())


async def test_what_a_dropped_request_had_computed_is_saved_before_the_next_launch(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE, token_delay=0.005) as here:
        a = Talk("alpha", predict=1000)
        async with here.proxy.stream(a) as stream:
            await stream.first()
        await here.proxy.until(lambda: here.proxy.slot_states.count("resident") == 1)
        here.fake.faults.token_delay = 0
        await here.proxy.turn(Talk("beta"))
        back = await here.proxy.turn(Talk("alpha", predict=4))
        assert back.told == ("restored", None)
        assert back.computed <= 2


async def test_what_could_not_be_saved_is_left_for_the_server_to_find(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE) as here:
        a, b = Talk("alpha"), Talk("beta")
        here.fake.faults.fail("save", "error", 1)
        await here.proxy.turn(a)
        await here.proxy.turn(b)
        here.forget_calls()

        answer = await here.proxy.turn(a)

        assert (answer.told, answer.slot) == (("cold", "evicted"), "-")
        assert answer.reused > answer.computed, "the server had it in memory"
        (sent,) = (call.body for call in here.fake.calls if call.path == "/v1/chat/completions")
        assert sent.endswith(b'"id_slot":-1,"cache_prompt":true}')
        assert (await here.proxy.turn(a)).told == ("resident", None), "it adopted the slot it had taken"
        await here.proxy.turn(b)
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_two_requests_of_one_conversation_that_is_adrift_do_not_both_own_it(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE, token_delay=0.005) as here:
        here.fake.faults.fail("save", "error", 1)
        await here.proxy.turn(Talk("alpha", predict=4))
        await here.proxy.at_rest()
        answers = await asyncio.gather(*(here.proxy.turn(Talk("alpha", predict=30)) for _ in range(2)))
        assert {answer.told for answer in answers} == {("cold", "evicted"), ("cold", "session-busy")}
        await here.proxy.at_rest()
        owners = [view.occupant for view in here.proxy.runtime.table.views() if view.occupant]
        assert len(owners) <= 1


async def test_a_server_that_was_used_before_is_found_out_as_well(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE) as here:
        await here.fake.restart()
        body = {"prompt": "somebody else was here first", "n_predict": 2}
        async with here.proxy.client.post(f"{here.fake.base_url}/completion", json=body) as response:
            assert response.status == 200
        await here.proxy.restart()
        await here.proxy.ready()
        assert here.proxy.runtime.standing.facts.is_volatile, (
            "the canary left every slot empty, so it could be tried"
        )
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        await here.proxy.turn(b)

        for talk in (a, b, a):
            answer = await here.proxy.turn(talk)
            assert not is_wrong(answer)
            assert answer.reused > answer.computed


async def test_a_kvproxy_started_again_still_knows_a_server_whose_slots_hold_something(
    tmp_path: Path,
) -> None:
    """It cannot be tried out, and two restores at once would clear each other."""
    async with house(tmp_path, **VOLATILE) as here:
        pair = [Talk("alpha"), Talk("beta")]
        for talk in pair:
            await here.proxy.turn(talk)
        await here.proxy.at_rest()
        await here.proxy.restart()
        await here.proxy.ready()
        assert here.proxy.runtime.standing.facts.is_volatile
        answers = await asyncio.gather(*(here.proxy.turn(talk) for talk in pair))
        assert not any(is_wrong(answer) for answer in answers)


async def test_200_times_an_emptied_slot_never_replaces_a_snapshot(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE) as here:
        a = Talk("alpha", predict=4)
        await here.proxy.turn(a)
        await here.proxy.at_rest()
        (manifest,) = here.manifests()
        published, files = manifest.read_bytes(), here.files

        def empty(event: Event) -> None:
            """Just before the save a request of somebody else is launched."""
            if isinstance(event, CheckpointStarted):
                here.fake.slots[event.slot].hold([])

        here.proxy.runtime.bus.subscribe(empty)
        for _ in range(200):
            assert (await here.proxy.turn(Talk("alpha", predict=4))).status == 200
            await here.proxy.until(lambda: not here.proxy.runtime.desk.out)
        await here.proxy.at_rest()
        ended = [event.outcome for event in here.proxy.heard(CheckpointEnded)]
        assert ended.count(CheckpointOutcome.EMPTY) == 200
        assert (manifest.read_bytes(), here.files) == (published, files)


async def test_a_launch_that_is_not_seen_holds_the_others_only_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "LAUNCH_SECONDS", 0.1)
    async with house(tmp_path, **VOLATILE, prefill_rate=1000, http_poll=1.0) as here:
        # For two seconds it computes a batch of this prompt, and launches nothing.
        long = asyncio.create_task(here.proxy.turn(Talk("alpha", words=100, predict=2)))
        await here.proxy.until(lambda: len(here.processing) == 1)
        one = asyncio.create_task(here.proxy.turn(Talk("beta", predict=2)))
        other = asyncio.create_task(here.proxy.turn(Talk("gamma", predict=2)))
        await here.proxy.until(lambda: here.completions() == 3, seconds=1.5)
        for answer in await asyncio.gather(long, one, other):
            assert answer.status == 200


async def test_a_conversation_that_may_not_be_stored_is_left_to_the_server_altogether(tmp_path: Path) -> None:
    async with house(tmp_path, **VOLATILE) as here:
        a, b = Talk("alpha"), Talk("beta")
        for _ in range(3):
            for talk in (a, b):
                answer = await here.proxy.post(
                    "/v1/chat/completions", talk.body(), **talk.headers, X_KVProxy_Persist="no"
                )
                talk.heard(answer.text)
        assert (answer.told, answer.reused > answer.computed) == (("cold", "evicted"), True)
        assert here.files == []
