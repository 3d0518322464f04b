"""A server whose slots share one memory (`--kv-unified`): nothing is sent that it has no room for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvproxy.telemetry.events import (
    PersistenceTripped,
    RequestFailed,
    RestoreEnded,
    SharedMemorySeen,
    SnapshotInvalidated,
)
from tests.support.proxy import House, house
from tests.support.talk import Answer, Talk

ROOM = 1000
SHARED = {"slots": 3, "unified": True, "n_ctx": ROOM}


async def side_by_side(here: House, *talks: Talk) -> tuple[list[Answer], int]:
    """The answers to one turn of each at the same time, and how many of them ran at once at most."""
    turns = [asyncio.ensure_future(here.proxy.turn(talk)) for talk in talks]
    most = 0
    while not all(turn.done() for turn in turns):
        most = max(most, len(here.processing))
        await asyncio.sleep(0.001)
    return [turn.result() for turn in turns], most


def restores(here: House) -> list[str]:
    return [event.outcome.value for event in here.proxy.heard(RestoreEnded)]


async def test_it_is_found_out_before_anybody_is_served_and_told(tmp_path: Path) -> None:
    async with house(tmp_path, **SHARED) as here:
        (told,) = here.proxy.heard(SharedMemorySeen)
        assert told.tokens == ROOM
        (server,) = (await here.proxy.status())["servers"]
        assert (server["state"], server["volatile_slots"], server["shared_tokens"]) == (
            "healthy",
            False,
            ROOM,
        )
        assert [slot.tokens for slot in here.fake.slots] == [[], [], []]
        assert here.files == []


async def test_slots_with_memories_of_their_own_are_never_asked_to_make_room(tmp_path: Path) -> None:
    async with house(tmp_path, slots=3, n_ctx=ROOM, token_delay=0.002) as here:
        talks = [Talk(name, words=20, predict=60) for name in ("alpha", "beta", "gamma")]
        answers, most = await side_by_side(here, *talks)
        assert ({answer.status for answer in answers}, most) == ({200}, 3)
        assert (await here.proxy.turn(talks[0])).told == ("resident", None)
        assert here.deeds == []
        (server,) = (await here.proxy.status())["servers"]
        assert server["shared_tokens"] is None


async def test_what_fits_runs_side_by_side(tmp_path: Path) -> None:
    async with house(tmp_path, **SHARED, token_delay=0.002) as here:
        talks = [Talk(name, words=3, predict=60) for name in ("alpha", "beta", "gamma")]
        answers, most = await side_by_side(here, *talks)
        assert ({answer.status for answer in answers}, most) == ({200}, 3)


async def test_two_that_would_both_fail_run_one_after_the_other(tmp_path: Path) -> None:
    async with house(tmp_path, **SHARED, token_delay=0.002) as here:
        talks = [Talk(name, words=10, predict=400) for name in ("alpha", "beta", "gamma")]
        answers, most = await side_by_side(here, *talks)
        assert ({answer.status for answer in answers}, most) == ({200}, 1)


async def test_one_that_cannot_fit_is_still_the_servers_to_refuse(tmp_path: Path) -> None:
    async with house(tmp_path, **SHARED) as here:
        answer = await here.proxy.post("/v1/chat/completions", Talk("alpha", words=100).body())
        assert answer.status == 400
        assert answer.code is None


async def test_idle_ones_make_room_as_far_as_it_takes_saved_before_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, **SHARED) as here:
        a, b, c = (Talk(name, words=10) for name in ("alpha", "beta", "gamma"))
        for talk in (a, b, c):
            assert (await here.proxy.turn(talk)).told == ("cold", "new-session")
        assert here.deeds == [("save", 0), ("erase", 0)], "the one that was used least recently"
        assert (await here.proxy.turn(c)).told == ("resident", None)
        back = await here.proxy.turn(a)
        assert (back.told, back.reused > back.computed) == (("restored", None), True)
        back = await here.proxy.turn(b)
        assert (back.told, back.reused > back.computed) == (("restored", None), True)


async def test_a_restore_finds_room_at_once_and_no_snapshot_is_blamed(tmp_path: Path) -> None:
    async with house(tmp_path, **{**SHARED, "n_ctx": 700}) as here:
        a, b, c = (Talk(name, words=8) for name in ("alpha", "beta", "gamma"))
        await here.proxy.turn(a)
        await here.proxy.admin("POST", "flush")
        await here.fake.restart()
        await here.proxy.turn(b)
        await here.proxy.turn(c)

        assert (await here.proxy.turn(a)).told == ("restored", None)

        assert restores(here) == ["restored"]
        assert (await here.proxy.turn(b)).told == ("restored", None)
        assert here.proxy.heard(SnapshotInvalidated) == []


async def test_where_files_are_not_seen_a_restore_that_is_refused_makes_room_and_shows_it(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, **{**SHARED, "n_ctx": 700}, shared=False) as here:
        a, b, c = (Talk(name, words=8) for name in ("alpha", "beta", "gamma"))
        await here.proxy.turn(a)
        await here.proxy.admin("POST", "flush")
        await here.fake.restart()
        await here.proxy.turn(b)
        await here.proxy.turn(c)
        assert here.proxy.heard(SharedMemorySeen) == []

        assert (await here.proxy.turn(a)).told == ("restored", None)

        assert restores(here) == ["memory_full", "restored"]
        assert len(here.proxy.heard(SharedMemorySeen)) == 1
        assert here.proxy.heard(SnapshotInvalidated) == []


async def test_where_nothing_shows_it_the_first_that_fail_together_begin_again_one_after_the_other(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, **SHARED, shared=False, token_delay=0.002) as here:
        talks = [Talk(name, words=10, predict=400) for name in ("alpha", "beta")]
        answers, _ = await side_by_side(here, *talks)
        assert [answer.status for answer in answers] == [200, 200]
        assert here.completions() == 4
        assert [answer.outcome for answer in answers] == ["cold", "cold"]
        assert len(here.proxy.heard(SharedMemorySeen)) == 1

        answers, most = await side_by_side(here, *talks)

        assert ({answer.status for answer in answers}, most) == ({200}, 1)
        assert here.completions() == 6
        assert here.proxy.heard(PersistenceTripped) == []
        assert here.proxy.heard(RequestFailed) == []


async def test_one_that_fails_alone_or_a_second_time_is_the_servers_to_answer(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, unified=True, n_ctx=4000, shared=False, slow_first_token=0.1) as here:
        here.fake.faults.out_of_room = 5
        answer = await here.proxy.turn(Talk("alpha", words=2))
        assert (answer.status, answer.code) == (500, None)
        assert answer.body["error"]["message"] == "Context size has been exceeded."
        assert here.completions() == 1, "alone it had nothing to gain"
        answers, most = await side_by_side(here, *(Talk(name, words=2) for name in ("beta", "gamma")))
        assert ([answer.status for answer in answers], most) == ([500, 500], 2)
        assert here.completions() == 5


async def test_a_stream_that_was_cut_off_leaves_a_slot_that_is_nobodys(tmp_path: Path) -> None:
    async with house(tmp_path, **SHARED, shared=False, token_delay=0.002) as here:
        a, b = (Talk(name, words=10, predict=400) for name in ("alpha", "beta"))
        other = asyncio.ensure_future(here.proxy.turn(b))
        async with here.proxy.stream(a) as stream:
            await stream.rest()
            assert b"Context size has been exceeded" in stream.raw
        assert (await other).status == 200
        await here.proxy.at_rest()
        occupants = [view.occupant for view in here.proxy.runtime.table.views() if view.occupant]
        assert len(occupants) == 1, "of the one that began again"
        assert (await here.proxy.turn(Talk("alpha", words=10))).outcome == "cold"


async def test_answers_without_a_limit_are_given_more_room_once_it_was_not_enough(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=2, unified=True, n_ctx=2600) as here:
        bodies = [{**Talk(name, words=2).body(), "max_tokens": -1, "ignore_eos": True} for name in "ab"]

        async def ask(number: int) -> int:
            headers = {"X_Session_Id": f"endless {number}"}
            return (await here.proxy.post("/v1/chat/completions", bodies[number], **headers)).status

        statuses = [set(await asyncio.gather(ask(0), ask(1))) for _ in range(2)]

        assert statuses == [{200}, {200}]
        assert here.completions() == 6, "the first two began again, each alone"


async def test_a_background_save_and_a_request_that_needs_the_whole_room_do_not_meet(tmp_path: Path) -> None:
    checkpoint = {"on_idle_seconds": 0.05}
    async with house(tmp_path, **SHARED, save_seconds=0.1, checkpoint=checkpoint) as here:
        a, b = Talk("alpha", words=10), Talk("beta", words=10, predict=900)
        await here.proxy.turn(a)
        await here.proxy.until(lambda: "saving" in here.proxy.slot_states)
        assert (await here.proxy.turn(b)).status == 200
        assert here.deeds == [("save", 0), ("erase", 0)]


ENDLESS = {"max_tokens": -1, "ignore_eos": True}
"""Goes on until its slot is full, which empties all idle slots on the way."""


async def test_a_slot_that_was_emptied_for_anothers_answer_is_not_called_resident(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, unified=True, n_ctx=3000) as here:
        a, b = Talk("alpha", words=10), Talk("beta")
        await here.proxy.turn(a)
        assert (await here.proxy.post("/v1/chat/completions", b.body(**ENDLESS), **b.headers)).status == 200
        assert here.fake.slots[0].tokens == [], "this is about a slot that was emptied"
        back = await here.proxy.turn(a)
        assert (back.told, back.reused) == (("cold", "evicted"), 0)


async def test_it_is_seen_without_anybody_asking_for_it_and_not_taken_for_idle_clearing(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=2, unified=True, n_ctx=3000) as here:
        a, b = Talk("alpha", words=10), Talk("beta")
        await here.proxy.turn(a)
        await here.proxy.admin("POST", "flush")
        await here.proxy.post("/v1/chat/completions", b.body(**ENDLESS), **b.headers)
        await here.proxy.until(lambda: here.proxy.slot_states == ["idle", "resident"])
        (server,) = (await here.proxy.status())["servers"]
        assert (server["state"], server["volatile_slots"]) == ("healthy", False)
        back = await here.proxy.turn(a)
        assert (back.told, back.reused > back.computed) == (("restored", None), True)


async def test_where_an_answer_ends_where_its_client_said_nobody_is_looked_at(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, unified=True, n_ctx=3000) as here:
        talks = [Talk("alpha", words=10), Talk("beta", words=10)]
        for talk in talks:
            await here.proxy.turn(talk)
        await asyncio.sleep(1.5)  # the record of living slots is learned
        here.forget_calls()
        for talk in talks:
            assert (await here.proxy.turn(talk)).told == ("resident", None)
        # The first, after more than a second of silence, asks whether the server fell asleep.
        asked = [call.path for call in here.fake.calls if call.path != "/props"]
        assert asked == ["/v1/chat/completions"] * 2


async def test_a_server_met_with_full_slots_is_not_taken_for_one_that_clears_them(tmp_path: Path) -> None:
    """Nothing could be tried out, and the first that shows itself is a memory that was full."""
    async with house(tmp_path, slots=2, unified=True, n_ctx=3000, shared=False) as here:
        await here.fake.restart()
        for slot in (0, 1):
            body = {"prompt": "somebody else was here first", "n_predict": 2, "id_slot": slot}
            async with here.proxy.client.post(f"{here.fake.base_url}/completion", json=body) as response:
                assert response.status == 200
        await here.proxy.restart()
        await here.proxy.ready()
        a, b = Talk("alpha", words=10), Talk("beta")
        await here.proxy.turn(a)
        await here.proxy.post("/v1/chat/completions", b.body(**ENDLESS), **b.headers)
        facts = here.proxy.runtime.standing
        await here.proxy.until(lambda: facts.facts.shares_memory is not None)
        assert (facts.facts.shares_memory, facts.facts.is_volatile) == (True, False)
        assert (await here.proxy.turn(a)).outcome == "cold"
