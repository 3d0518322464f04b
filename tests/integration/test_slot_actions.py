"""Exactly which slot actions a request causes, and what its headers say of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvproxy.sessions import memory
from kvproxy.upstream import living
from tests.support.proxy import house
from tests.support.talk import Talk


async def test_one_slot_sees_exactly_the_actions_that_a_switch_needs(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a, b = Talk("alpha"), Talk("beta")
        first = await here.proxy.turn(a)
        assert (first.told, here.deeds) == (("cold", "new-session"), [])
        again = await here.proxy.turn(a)
        assert (again.told, here.deeds) == (("resident", None), [])
        other = await here.proxy.turn(b)
        assert (other.told, here.deeds) == (("cold", "new-session"), [("save", 0), ("erase", 0)])
        here.forget_calls()
        back = await here.proxy.turn(a)
        assert (back.told, here.deeds) == (("restored", None), [("save", 0), ("restore", 0)])


async def test_a_restored_conversation_reuses_all_it_had_and_says_how_much(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a, b = Talk("alpha"), Talk("beta")
        first = await here.proxy.turn(a)
        held = first.computed + a.predict - 1
        await here.proxy.turn(b)
        back = await here.proxy.turn(a)
        assert back.headers["X-KVProxy-Restored-Tokens"] == str(held)
        assert back.reused == held
        assert float(back.headers["X-KVProxy-Prepare-Ms"]) > 0
        assert len(back.headers["X-KVProxy-Session"]) == 12


async def test_a_conversation_whose_snapshot_is_still_true_is_not_saved_again(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        await here.proxy.admin("POST", "flush")
        here.forget_calls()
        await here.proxy.turn(b)
        assert here.deeds == [("erase", 0)]


async def test_without_saves_at_a_switch_the_conversation_comes_back_cold_and_is_told_why(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, checkpoint={"on_switch": False}) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        await here.proxy.turn(b)
        back = await here.proxy.turn(a)
        assert back.told == ("cold", "evicted")
        assert {deed for deed, _ in here.deeds} == {"erase"}


async def test_a_conversation_below_the_least_size_is_computed_again_rather_than_saved(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, checkpoint={"min_tokens": 100_000}) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        await here.proxy.turn(b)
        assert (await here.proxy.turn(a)).told == ("cold", "evicted")
        assert here.files == []


async def test_a_conversation_lost_with_the_server_before_any_save_is_told_so(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await here.fake.restart()
        assert (await here.proxy.turn(a)).told == ("cold", "server-restarted")


async def test_a_server_without_room_to_save_says_that_persistence_is_off(tmp_path: Path) -> None:
    async with house(tmp_path, persists=False, shared=False) as here:
        a, b = Talk("alpha"), Talk("beta")
        assert (await here.proxy.turn(a)).told == ("cold", "new-session")
        assert (await here.proxy.turn(a)).told == ("resident", None)
        await here.proxy.turn(b)
        assert (await here.proxy.turn(a)).told == ("cold", "persistence-off")
        assert here.deeds == []


async def test_a_client_may_forbid_the_disk_for_its_conversation(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        secret, b = Talk("alpha"), Talk("beta")
        headers = {**secret.headers, "X-KVProxy-Persist": "no"}
        await here.proxy.post("/v1/chat/completions", secret.body(), **headers)
        await here.proxy.turn(b)
        assert here.files == []


@pytest.fixture
def no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sessions live and what they said is written down by the clock, and not by requests."""
    monkeypatch.setattr(living, "PERIOD_SECONDS", 3600.0)
    monkeypatch.setattr(memory, "PERIOD_SECONDS", 3600.0)


@pytest.mark.usefixtures("no_records")
async def test_a_hundred_resident_requests_cause_no_action_and_touch_no_file(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha", predict=4)
        await here.proxy.turn(a)
        await here.proxy.admin("POST", "flush")
        await here.proxy.at_rest()
        before, _ = audit(tmp_path), here.forget_calls()
        for _ in range(100):
            assert (await here.proxy.turn(a)).told == ("resident", None)
        assert here.deeds == []
        assert audit(tmp_path) == before


@pytest.mark.usefixtures("no_records")
async def test_two_conversations_that_stay_in_their_slots_cause_no_action_and_touch_no_file(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=2) as here:
        talks = [Talk("alpha", predict=4), Talk("beta", predict=4)]
        slots = [(await here.proxy.turn(talk)).slot for talk in talks]
        await here.proxy.admin("POST", "flush")
        await here.proxy.at_rest()
        before, _ = audit(tmp_path), here.forget_calls()
        for _ in range(50):
            answers = [await here.proxy.turn(talk) for talk in talks]
            assert [answer.slot for answer in answers] == slots
            assert {answer.outcome for answer in answers} == {"resident"}
        assert here.deeds == []
        assert audit(tmp_path) == before


def audit(root: Path) -> dict[str, tuple[int, int, int, int]]:
    """Every file and directory below `root`: a touch of any kind shows."""
    found = {}
    for directory, _, files in os.walk(root):
        for path in (directory, *(os.path.join(directory, name) for name in files)):
            seen = os.stat(path)
            found[path] = (seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
    return found
