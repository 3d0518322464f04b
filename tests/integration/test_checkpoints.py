"""Saves that nobody waits for: idle, age, turn, request, ahead of a switch; and what is kept of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kvproxy.checkpoint.outcome import CheckpointOutcome
from kvproxy.telemetry.events import CheckpointEnded, Warned
from tests.support.proxy import House, house
from tests.support.talk import Talk


def saves(here: House) -> list[tuple[str, str]]:
    return [(event.trigger, event.outcome) for event in here.proxy.heard(CheckpointEnded)]


async def until_saved(here: House, count: int = 1) -> None:
    await here.proxy.until(lambda: len(saves(here)) == count, 5)


async def test_a_conversation_left_alone_is_saved_once(tmp_path: Path) -> None:
    async with house(tmp_path, checkpoint={"on_idle_seconds": 0.2}) as here:
        await here.proxy.turn(Talk("alpha"))
        assert saves(here) == []
        await until_saved(here)
        assert saves(here) == [("idle", "published")]
        await asyncio.sleep(1.2)
        assert len(saves(here)) == 1


async def test_an_idle_conversation_is_not_saved_while_another_one_is_being_served(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.01, checkpoint={"on_idle_seconds": 0.2}) as here:
        await here.proxy.turn(Talk("alpha", predict=1))
        async with here.proxy.stream(Talk("beta", predict=140)) as stream:
            await stream.rest()
            assert saves(here) == []
        await until_saved(here, 2)


async def test_a_loop_that_never_pauses_is_saved_once_it_is_dirty_for_long_enough(tmp_path: Path) -> None:
    async with house(tmp_path, checkpoint={"on_idle_seconds": 30, "max_dirty_seconds": 0.3}) as here:
        a = Talk("alpha", predict=2)
        for _ in range(40):
            await here.proxy.turn(a)
            if saves(here):
                break
            await asyncio.sleep(0.02)
        assert saves(here) == [("age", "published")]


async def test_a_loop_is_saved_once_enough_of_it_is_unsaved(tmp_path: Path) -> None:
    async with house(tmp_path, checkpoint={"max_unsaved_tokens": 400}) as here:
        a = Talk("alpha", words=2, predict=50)
        turns = 0
        while not saves(here) and turns < 20:
            await here.proxy.turn(a)
            turns += 1
            await asyncio.sleep(0.03)
        assert saves(here) == [("age", "published")]
        assert turns > 2


async def test_a_finished_turn_is_saved_where_that_is_asked_for(tmp_path: Path) -> None:
    async with house(tmp_path, checkpoint={"on_turn": True}) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await until_saved(here)
        await here.proxy.turn(a)
        await until_saved(here, 2)
        assert saves(here) == [("turn", "published")] * 2


async def test_a_turn_that_calls_a_tool_is_not_finished(tmp_path: Path) -> None:
    async with house(tmp_path, checkpoint={"on_turn": True}) as here:
        tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        a = Talk("alpha")
        answer = await here.proxy.turn(a, tools=tools, tool_choice="required")
        assert answer.body["choices"][0]["finish_reason"] == "tool_calls"
        await here.proxy.at_rest()
        assert saves(here) == []
        async with here.proxy.stream(a, tools=tools, tool_choice="required") as stream:
            await stream.rest()
        await here.proxy.at_rest()
        assert saves(here) == []
        await here.proxy.turn(a, tools=tools)
        await until_saved(here)


async def test_every_request_is_saved_where_that_is_asked_for_and_the_next_waits_for_it(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, checkpoint={"on_request": True}, save_seconds=0.1) as here:
        a = Talk("alpha")
        for count in (1, 2, 3):
            assert (await here.proxy.turn(a)).status == 200
            await until_saved(here, count)
        assert saves(here) == [("request", "published")] * 3
        await here.fake.restart()
        back = await here.proxy.turn(a)
        assert back.told == ("restored", None)


async def test_under_pressure_the_next_victim_is_saved_ahead_so_that_a_switch_need_not_wait(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=2) as here:
        talks = [Talk("alpha"), Talk("beta"), Talk("gamma")]
        for talk in talks:
            await here.proxy.turn(talk)
        for talk in talks * 2:
            # Whoever is next to leave is saved by now, but not who was served last.
            await here.proxy.until(lambda: sum(view.is_dirty for view in views(here)) == 1)
            here.forget_calls()
            assert (await here.proxy.turn(talk)).told == ("restored", None)
            before = [deed for deed, _ in here.deeds]
            assert before[0] == "restore"
        outcomes = {outcome for _, outcome in saves(here)}
        assert outcomes == {CheckpointOutcome.PUBLISHED}


def views(here: House) -> tuple[Any, ...]:
    return here.proxy.runtime.table.views()


async def test_one_conversation_alone_is_never_saved_for_a_switch(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        a = Talk("alpha", predict=4)
        for _ in range(10):
            await here.proxy.turn(a)
        await asyncio.sleep(0.05)
        assert saves(here) == []


async def test_at_most_two_generations_of_a_conversation_lie_on_the_disk(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        for _ in range(4):
            await here.proxy.turn(a)
            await here.proxy.admin("POST", "flush")
        await here.proxy.at_rest()
        assert len(here.files) == 2


async def test_a_quota_lets_the_least_recently_used_go_with_their_files(tmp_path: Path) -> None:
    async with house(tmp_path, retention={"max_snapshots": 2}) as here:
        talks = [Talk(f"t{n}") for n in range(4)]
        for talk in talks:
            await here.proxy.turn(talk)
            await here.proxy.admin("POST", "flush")
            await here.proxy.at_rest()
        await here.proxy.until(lambda: len(here.files) == 2)
        assert len(here.manifests()) == 2
        assert (await here.proxy.turn(talks[0])).told == ("cold", "evicted")
        assert (await here.proxy.turn(talks[3])).told == ("restored", None)


async def test_a_quota_of_bytes_is_held(tmp_path: Path) -> None:
    async with house(tmp_path, retention={"max_total_bytes": 250_000}) as here:
        for number in range(5):
            await here.proxy.turn(Talk(f"t{number}"))
            await here.proxy.admin("POST", "flush")
            await here.proxy.at_rest()
        await here.proxy.until(lambda: sum(path.stat().st_size for path in here.files) <= 250_000)
        assert len(here.files) >= 2


async def test_files_that_only_the_server_can_see_are_named_once_when_they_should_go(tmp_path: Path) -> None:
    async with house(tmp_path, shared=False, retention={"max_snapshots": 1}) as here:
        for number in range(4):
            await here.proxy.turn(Talk(f"t{number}"))
            await here.proxy.admin("POST", "flush")
            await here.proxy.at_rest()
        await here.proxy.until(lambda: len(here.manifests()) == 1)
        (warning,) = here.proxy.heard(Warned)
        assert "snapshot_dir" in warning.message
        assert len(here.files) == 4


async def test_what_a_kill_left_behind_is_swept_and_nothing_else(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        await here.proxy.admin("POST", "flush")
        await here.proxy.at_rest()
        (kept,) = here.files
        stranger = here.slot_dir / "somebody-elses.bin"
        orphan = kept.with_name(_another(kept.name))
        for path in (orphan, stranger):
            path.write_bytes(b"x")
        await here.proxy.admin("POST", "gc")
        assert here.files == sorted([kept, stranger])


def _another(name: str) -> str:
    """A name of the same making that no manifest knows."""
    stem, dot, suffix = name.rpartition(".")
    return stem[:-1] + ("0" if stem[-1] != "0" else "1") + dot + suffix
