"""Which slot actions a real server is asked for, exactly."""

from __future__ import annotations

import asyncio

import pytest

from tests.acceptance.conftest import SetStage
from tests.support.load import Answer, Conversation, client
from tests.support.raw import connection

pytestmark = pytest.mark.real

ONE_SLOT = ("-c", "8192", "-np", "1", "--cache-ram", "0")
QUIET = ("checkpoint.on_idle_seconds=0",)


def told(answer: Answer) -> tuple[int, str, str]:
    return answer.status, answer.outcome, answer.reason


async def test_first_again_switch_and_back_cost_exactly_their_slot_actions(set_stage: SetStage) -> None:
    stage = await set_stage(*ONE_SLOT, settings=QUIET)
    a, b = Conversation.about("a"), Conversation.about("b")
    async with client(stage.url) as session:
        assert told(await a.turn(session)) == (200, "cold", "new-session")
        assert stage.tap.slot_actions() == []
        first = await a.turn(session)
        assert told(first) == (200, "resident", "")
        assert stage.tap.slot_actions() == []
        assert told(await b.turn(session)) == (200, "cold", "new-session")
        assert stage.tap.slot_actions() == [("save", 0), ("erase", 0)]
        back = await a.turn(session)
        assert told(back) == (200, "restored", "")
        assert stage.tap.slot_actions()[2:] == [("save", 0), ("restore", 0)]
        assert back.reused >= first.prompt


async def test_a_session_that_stays_costs_neither_a_slot_action_nor_a_file(set_stage: SetStage) -> None:
    stage = await set_stage(*ONE_SLOT, settings=QUIET)
    conversation = Conversation.about("a", 50, max_tokens=1)
    before = None
    async with client(stage.url) as session:
        for _ in range(15):
            answer = await conversation.turn(session)
            assert before is None or answer.reused >= before.prompt
            before = answer
    assert stage.tap.slot_actions() == []
    assert list(stage.slot_dir.iterdir()) == []


SPELLED = ("/slots/0", "/sl%6fts/0", "/sl%u006fts/0", "/slots%u002f0", "/slots/0#x")


async def test_every_spelling_of_a_slot_action_that_the_server_takes_is_refused(set_stage: SetStage) -> None:
    stage = await set_stage(*ONE_SLOT, settings=QUIET)
    for path in SPELLED:
        asked = f"POST {path}{'' if '#' in path else '?action=erase'} HTTP/1.1\r\nHost: localhost\r\n"
        statuses = []
        for url in (stage.llama.base_url, stage.url):
            async with connection(int(url.rpartition(":")[2])) as wire:
                await wire.send(f"{asked}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
                statuses.append(int((await asyncio.wait_for(wire.head(), 10)).split()[1]))
        assert statuses[0] != 404, path
        assert statuses[1] == 403, path
