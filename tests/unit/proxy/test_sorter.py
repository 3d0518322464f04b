from __future__ import annotations

from typing import Any, cast

import orjson
import pytest
from aiohttp.test_utils import make_mocked_request

from kvproxy.dialects.endpoints import Reach, classify
from kvproxy.dialects.reading import read
from kvproxy.proxy.call import Call
from kvproxy.proxy.sorter import Sorter
from kvproxy.proxy.visit import Visit
from kvproxy.sessions.identity import Identity
from kvproxy.sessions.key import ClientId
from kvproxy.settings.model import AuxiliarySettings
from kvproxy.telemetry.events import AuxiliarySeen
from tests.support.fakes_core import MAIN, Sink

TITLE = {
    "messages": [
        {"role": "system", "content": "You are a title generator. You output ONLY a thread title."},
        {"role": "user", "content": "hello"},
    ]
}
TURN = {"messages": [{"role": "user", "content": "hello"}], "tools": [{}]}
SIDE = {"messages": [{"role": "user", "content": "sum up"}]}
ONE = ClientId("x-session-id", "one")


class Room:
    def __init__(self, *, continues: bool = False) -> None:
        self.sink = Sink()
        self.sorter = Sorter(MAIN, AuxiliarySettings(), self.sink)
        self.continues = continues

    async def sort(
        self,
        document: dict[str, Any],
        *,
        path: str = "/v1/chat/completions",
        client: ClientId | None = ONE,
        reach: Reach = Reach.PINNED,
        is_bypass: bool = False,
    ) -> Call:
        endpoint = classify("POST", path)
        body, reading = orjson.dumps(document), read(endpoint.label, document)
        call = Call(endpoint, reach, body, Identity(client), is_bypass, False, True, reading=reading)
        await self.sorter.load()
        visit = Visit(make_mocked_request("POST", path), call, cast(Any, None), cast(Any, None))
        return self.sorter.sorted(visit, continues=self.continues).call


async def test_a_side_call_owns_nothing_and_is_told() -> None:
    room = Room()
    assert (await room.sort(TITLE)).is_auxiliary
    assert room.sink.of(AuxiliarySeen) == [AuxiliarySeen(MAIN, "chat/completions", "OpenCode, Kilo (title)")]


async def test_a_turn_stays_as_it_is() -> None:
    room = Room()
    assert not (await room.sort(TURN)).is_auxiliary
    assert room.sink.of(AuxiliarySeen) == []


async def test_what_a_conversations_turns_are_like_is_learned_from_turns_alone() -> None:
    room = Room()
    assert not (await room.sort(SIDE)).is_auxiliary
    await room.sort(TURN)
    assert (await room.sort(SIDE)).is_auxiliary
    assert not (await room.sort(SIDE, client=ClientId("x-session-id", "two"))).is_auxiliary


async def test_a_suspect_that_carries_its_conversation_on_is_a_turn() -> None:
    assert not (await Room(continues=True).sort(TITLE)).is_auxiliary


async def test_a_side_call_without_an_id_is_not_left_to_the_server() -> None:
    call = await Room().sort(TITLE, client=None, reach=Reach.FLOATING)
    assert (call.is_auxiliary, call.reach) == (True, Reach.PINNED)


@pytest.mark.parametrize(("path", "reach"), [("/v1/messages", Reach.FLOATING)])
async def test_where_no_slot_can_be_named_the_server_chooses_still(path: str, reach: Reach) -> None:
    call = await Room().sort(TITLE, path=path, reach=reach)
    assert (call.is_auxiliary, call.reach) == (True, reach)


async def test_a_request_that_goes_round_us_is_not_sorted() -> None:
    assert not (await Room().sort(TITLE, is_bypass=True)).is_auxiliary
