"""Several conversations at once: really at once where there are slots, in order where there are not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.proxy import House, house
from tests.support.talk import Answer, Talk


async def test_two_conversations_stream_at_the_same_time_on_two_slots(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.005) as here:
        a, b = Talk("alpha", predict=40), Talk("beta", predict=40)
        async with here.proxy.stream(a) as one, here.proxy.stream(b) as two:
            await one.first()
            await two.first()
            assert here.processing == [0, 1]
            assert here.proxy.slot_states == ["serving", "serving"]
            assert {one.slot, two.slot} == {"0", "1"}
            assert a.is_mine(await one.rest())
            assert b.is_mine(await two.rest())
        assert here.fake.max_concurrent_on_slot == 1


async def test_four_conversations_on_two_slots_are_served_in_the_order_they_came(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.005) as here:
        order: list[str] = []
        talks = [Talk(f"t{n}", predict=30) for n in range(4)]

        async def turn(talk: Talk) -> Answer:
            answer = await here.proxy.turn(talk)
            order.append(talk.name)
            return answer

        running = []
        for number, talk in enumerate(talks):
            running.append(asyncio.create_task(turn(talk)))
            await here.proxy.until(lambda n=number: _seen(here) > n)
        answers = await asyncio.gather(*running)
        assert set(order[:2]) == {"t0", "t1"}
        assert {answer.status for answer in answers} == {200}
        again = await asyncio.gather(*(here.proxy.turn(talk) for talk in talks))
        assert {answer.outcome for answer in again} <= {"resident", "restored"}
        assert {answer.outcome for answer in again} >= {"restored"}
        assert here.fake.max_concurrent_on_slot == 1


def _seen(here: House) -> int:
    """Requests that hold a slot or wait for one."""
    desk = here.proxy.runtime.desk
    return desk.waiting + desk.out


async def test_a_second_request_of_a_busy_conversation_runs_elsewhere_and_takes_nothing_from_it(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=2, token_delay=0.005) as here:
        a = Talk("alpha", predict=40)
        async with here.proxy.stream(a) as first:
            await first.first()
            second = await here.proxy.turn(Talk("alpha", predict=4))
            assert second.told == ("cold", "session-busy")
            assert second.slot != first.slot
            a.heard(await first.rest())
        third = await here.proxy.turn(a)
        assert (third.told, third.slot) == (("resident", None), first.slot)
        assert third.reused > third.computed


async def test_a_second_request_of_a_busy_conversation_waits_where_there_is_one_slot(tmp_path: Path) -> None:
    async with house(tmp_path, token_delay=0.005) as here:
        a = Talk("alpha", predict=20)
        async with here.proxy.stream(a) as first:
            await first.first()
            waiting = asyncio.create_task(here.proxy.turn(Talk("alpha", predict=4)))
            await here.proxy.until(lambda: here.proxy.runtime.desk.waiting == 1)
            assert here.completions() == 1
            await first.rest()
            second = await waiting
        assert second.told == ("resident", None)
        assert here.deeds == []


async def test_a_conversation_that_comes_back_while_it_is_being_evicted_waits_and_is_restored(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, save_seconds=0.2) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        other = asyncio.create_task(here.proxy.turn(b))
        await here.proxy.until(lambda: here.proxy.slot_states == ["saving"])
        back = await here.proxy.turn(a)
        assert (await other).told == ("cold", "new-session")
        assert back.told == ("restored", None)


async def test_a_conversation_that_comes_back_while_it_is_being_saved_waits_for_its_own_slot(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=2, save_seconds=0.2) as here:
        a = Talk("alpha")
        slot = (await here.proxy.turn(a)).slot
        flush = asyncio.create_task(here.proxy.admin("POST", "flush"))
        await here.proxy.until(lambda: "saving" in here.proxy.slot_states)
        back = await here.proxy.turn(a)
        assert (back.told, back.slot) == (("resident", None), slot)
        assert (await flush).body == {"saved": 1, "failed": 0}


async def test_a_full_line_answers_429_and_a_long_wait_503_both_with_a_time_to_come_back(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, token_delay=0.02, queue={"max_waiting": 1, "max_wait_seconds": 0.3}) as here:
        async with here.proxy.stream(Talk("alpha", predict=100)) as first:
            await first.first()
            waiting = asyncio.create_task(here.proxy.turn(Talk("beta")))
            await here.proxy.until(lambda: here.proxy.runtime.desk.waiting == 1)
            refused = await here.proxy.turn(Talk("gamma"))
            assert (refused.status, refused.code) == (429, "KV_QUEUE_FULL")
            late = await waiting
            assert (late.status, late.code) == (503, "KV_QUEUE_TIMEOUT")
            for answer in (refused, late):
                assert int(answer.headers["Retry-After"]) >= 1
                assert answer.body["error"]["code"] == answer.code
            assert here.completions() == 1


async def test_many_conversations_hammering_two_slots_all_get_their_own_answers(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, mix_on_busy=True, token_delay=0.0005) as here:
        talks = [Talk(f"t{n}", predict=8) for n in range(6)]

        async def live(talk: Talk) -> list[Answer]:
            return [await here.proxy.turn(talk) for _ in range(6)]

        answers = await asyncio.gather(*(live(talk) for talk in talks))
        later = [answer for lives in answers for answer in lives[1:]]
        assert {answer.outcome for answer in later} <= {"resident", "restored"}
        assert all(answer.reused > answer.computed for answer in later)
        assert here.fake.max_concurrent_on_slot == 1
