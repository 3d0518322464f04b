"""A draft model's memory is in no snapshot; and servers that refuse slot actions altogether."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.telemetry.events import PersistenceTripped, Warned
from tests.fakes.faults import Failure
from tests.support.proxy import House, house
from tests.support.talk import Talk


def lose_track(here: House) -> None:
    """Let the draft's memory end before the text of the slot."""
    here.fake.slots[0].draft_tokens = 1


async def test_a_slot_is_erased_before_a_restore(tmp_path: Path) -> None:
    async with house(tmp_path, draft=True) as here:
        a, b = Talk("alpha"), Talk("beta", words=1)
        await here.proxy.turn(a)
        await here.proxy.turn(b)
        here.forget_calls()
        back = await here.proxy.turn(a)
        assert (back.status, back.told) == (200, ("restored", None))
        assert here.deeds == [("save", 0), ("erase", 0), ("restore", 0)]


async def test_a_server_without_a_draft_model_is_spared_the_erase(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await here.proxy.turn(Talk("beta"))
        here.forget_calls()
        await here.proxy.turn(a)
        assert here.deeds == [("save", 0), ("restore", 0)]


async def test_an_erase_that_fails_leaves_the_snapshot_alone_and_the_prompt_cold(tmp_path: Path) -> None:
    async with house(tmp_path, draft=True) as here:
        a, b = Talk("alpha"), Talk("beta", words=1)
        await here.proxy.turn(a)
        await here.proxy.turn(b)
        here.fake.faults.fail("erase", Failure.ERROR, times=1)
        back = await here.proxy.turn(a)
        assert (back.status, back.told) == (200, ("cold", "restore-failed"))
        await here.proxy.at_rest()
        assert all(one.is_valid for m in here.proxy.runtime.store.all() for one in m.generations)


async def test_a_request_that_failed_on_the_drafts_memory_is_sent_again_and_the_client_sees_one_answer(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, draft=True) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        lose_track(here)
        here.forget_calls()
        answer = await here.proxy.turn(a)
        assert (answer.status, answer.told) == (200, ("cold", "restore-failed"))
        assert answer.reused == 0
        assert here.deeds == [("erase", 0)]
        assert here.completions() == 2
        assert (await here.proxy.turn(a)).told == ("resident", None)


async def test_it_is_sent_again_once_only(tmp_path: Path) -> None:
    async with house(tmp_path, draft=True) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        lose_track(here)
        here.fake.faults.fail("erase", Failure.ERROR, times=1)
        here.forget_calls()
        answer = await here.proxy.turn(a)
        assert answer.status == 500
        assert "speculative batch" in answer.body["error"]["message"]
        assert here.completions() == 1
        assert (await here.proxy.turn(a)).status == 200


async def test_a_stream_that_failed_so_leaves_a_slot_in_which_the_next_try_succeeds(tmp_path: Path) -> None:
    async with house(tmp_path, draft=True) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        lose_track(here)
        async with here.proxy.stream(a) as stream:
            await stream.rest()
        assert b"speculative batch" in stream.raw
        await here.proxy.at_rest()
        assert here.proxy.slot_states == ["idle"]
        assert (await here.proxy.turn(a)).status == 200


async def test_any_other_error_reaches_the_client_whole_and_nothing_is_erased(tmp_path: Path) -> None:
    async with house(tmp_path, draft=True) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        here.forget_calls()
        here.fake.faults.fail("completion", Failure.ERROR, times=1)
        answer = await here.proxy.turn(a)
        assert answer.status == 500
        assert answer.body["error"]["message"] == "planned failure"
        assert (here.deeds, here.completions()) == ([], 1)
        assert (await here.proxy.turn(a)).told == ("resident", None)


@pytest.mark.parametrize("persists_before", [True, False])
async def test_a_server_that_refuses_slot_actions_is_believed_once_and_for_all(
    tmp_path: Path, persists_before: bool
) -> None:
    async with house(tmp_path, multimodal=not persists_before) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        await here.proxy.turn(b)
        here.fake.setup.multimodal = True
        here.forget_calls()
        for talk in (a, b, a, b):
            assert (await here.proxy.turn(talk)).status == 200
        assert len(here.deeds) == persists_before
        assert len(here.proxy.heard(Warned)) == 1
        assert here.proxy.heard(PersistenceTripped) == []
        status = await here.proxy.status()
        persistence = status["servers"][0]["persistence"]
        assert persistence["mode"] == "off"
        assert "multimodal" in persistence["reason"]
