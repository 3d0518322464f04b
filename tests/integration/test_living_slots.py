"""A kvproxy that is started again in front of a server that lived on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp

from tests.support.proxy import House, house
from tests.support.talk import Talk


def record(here: House) -> Path:
    return here.state_dir / "living-main.json"


async def noted(here: House) -> None:
    """As after a second or two."""
    await here.proxy.at_rest()
    await here.proxy.runtime.living.keep()


async def reborn(here: House) -> None:
    """kvproxy is killed, without a chance to write anything, and started again."""
    left = record(here).read_bytes() if record(here).exists() else None
    await here.proxy.stop()
    if left is None:
        record(here).unlink(missing_ok=True)
    else:
        record(here).write_bytes(left)
    await here.proxy.start()
    await here.proxy.ready()
    here.forget_calls()


async def test_conversations_go_on_where_they_were_without_a_slot_action(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        a, b = Talk("alpha"), Talk("beta")
        for talk in (a, b, a):
            await here.proxy.turn(talk)
        await noted(here)
        await reborn(here)
        for talk in (a, b):
            answer = await here.proxy.turn(talk)
            assert answer.told == ("resident", None)
            assert answer.reused > answer.computed
        assert here.deeds == []


async def test_what_was_not_saved_is_still_to_be_saved(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await noted(here)
        await reborn(here)
        assert (await here.proxy.status())["servers"][0]["slots"][0]["dirty"]
        await here.proxy.turn(Talk("beta"))
        assert here.deeds[0] == ("save", 0)
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_what_was_saved_is_clean(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await here.proxy.admin("POST", "flush")
        await noted(here)
        await reborn(here)
        await here.proxy.turn(Talk("beta"))
        assert here.deeds == [("erase", 0)]
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_a_shutdown_leaves_the_record_by_itself(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await here.proxy.drain()
        await here.proxy.restart()
        await here.proxy.ready()
        here.forget_calls()
        assert (await here.proxy.turn(a)).told == ("resident", None)
        assert here.deeds == []


async def test_a_slot_in_which_somebody_else_ran_meanwhile_is_not_believed(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await noted(here)
        await here.proxy.stop()
        async with aiohttp.ClientSession(here.fake.base_url) as stranger:
            await stranger.post("/completion", json={"prompt": "a stranger", "n_predict": 2})
        await here.proxy.start()
        await here.proxy.ready()
        assert here.proxy.slot_states == ["idle"]
        assert (await here.proxy.turn(a)).outcome == "cold"


async def test_a_slot_whose_last_request_nobody_saw_the_end_of_is_not_believed(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await noted(here)
        await here.proxy.turn(a)
        await reborn(here)
        assert here.proxy.slot_states == ["idle"]


async def test_another_life_of_the_server_is_not_believed(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await noted(here)
        await here.proxy.stop()
        await here.fake.restart()
        async with aiohttp.ClientSession(here.fake.base_url) as stranger:
            await stranger.post("/v1/chat/completions", json=a.body())
        await here.proxy.start()
        await here.proxy.ready()
        assert here.proxy.slot_states == ["idle"]


async def test_a_server_that_slept_meanwhile_is_not_believed(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await noted(here)
        await here.proxy.stop()
        here.fake.sleep()
        await here.proxy.start()
        await here.proxy.ready()
        assert here.proxy.slot_states == ["idle"]
        assert (await here.proxy.turn(a)).outcome == "cold"


async def test_a_restore_into_the_slot_takes_the_record_away_first(tmp_path: Path) -> None:
    """Two conversations of equal length, and a kill between a restore and the request it was for."""
    async with house(tmp_path) as here:
        a, b = Talk("alpha"), Talk("gamma")
        await here.proxy.turn(b)
        await here.proxy.turn(a)
        await noted(here)
        assert record(here).exists()
        there: list[bool] = []
        here.fake.faults.restore_seconds = 0.2
        asking = asyncio.create_task(here.proxy.turn(b))
        await here.proxy.until(lambda: ("restore", 0) in here.deeds)
        there.append(record(here).exists())
        await asking
        assert there == [False]


async def test_a_conversation_that_is_to_leave_no_trace_leaves_none(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        body = Talk("alpha").body()
        headers = {"X_Session_Id": "alpha", "X_KVProxy_Persist": "no"}
        await here.proxy.post("/v1/chat/completions", body, **headers)
        await noted(here)
        assert json.loads(record(here).read_bytes())["slots"] == []


async def test_a_record_that_is_none_is_no_reason_not_to_start(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        record(here).write_bytes(b"{")
        await here.proxy.restart()
        await here.proxy.ready()
        assert (await here.proxy.turn(Talk("alpha"))).status == 200
        await noted(here)
        assert json.loads(record(here).read_bytes())["slots"]


async def test_nobody_is_looked_at_while_a_dropped_request_is_to_be_noticed(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.01) as here:
        await here.proxy.turn(Talk("alpha"))
        async with here.proxy.stream(Talk("beta", predict=2000)) as stream:
            await stream.first()
        await here.proxy.until(lambda: "cancelling" in here.proxy.slot_states)
        here.forget_calls()
        await here.proxy.runtime.living.keep()
        looks = [call for call in here.fake.calls if call.path == "/slots"]
        assert len(looks) <= 1  # the probe's own
        assert all(view.sight is None for view in here.proxy.runtime.table.views())
