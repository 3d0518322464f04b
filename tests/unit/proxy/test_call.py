from __future__ import annotations

import gzip
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from multidict import CIMultiDict

from kvproxy.dialects.endpoints import Reach, classify
from kvproxy.dialects.opening import WORTH_CHARS
from kvproxy.errors import ErrorCode, ReplyError
from kvproxy.proxy.call import Call, Terms, receive
from kvproxy.sessions.identity import Sources
from kvproxy.sessions.key import ClientId

CHAT = "/v1/chat/completions"
NAMED = {"X-Session-Id": "chat-1"}


class Content:
    def __init__(self, body: bytes) -> None:
        self._pieces = [body] if body else []

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def read_nowait(self) -> bytes:
        return b"".join(self._pieces)

    def is_eof(self) -> bool:
        return True


async def called(
    document: object = None,
    headers: dict[str, str] | None = None,
    *,
    path: str = CHAT,
    max_bytes: int = 10_000,
    is_implicit: bool = True,
    has_tenants: bool = False,
    stills_stamp: bool = False,
) -> Call:
    body = document if isinstance(document, bytes) else orjson.dumps(document or {"messages": []})
    request = SimpleNamespace(
        headers=CIMultiDict(headers or {}), content=Content(body), content_length=len(body), transport=None
    )
    terms = Terms(
        Sources(("x-session-id",), ("session_id",)), is_implicit, has_tenants, max_bytes, stills_stamp
    )
    return await receive(cast(Any, request), classify("POST", path), terms)


async def test_a_named_conversation_owns_what_it_computes_in_one_slot() -> None:
    call = await called({"messages": []}, NAMED)

    assert call.client == ClientId("x-session-id", "chat-1")
    assert (call.reach, call.is_owner, call.may_persist) == (Reach.PINNED, True, True)
    assert call.body == b'{"messages":[]}'


async def test_a_request_of_nobody_lets_the_server_choose() -> None:
    call = await called()
    assert (call.client, call.reach, call.is_owner) == (None, Reach.FLOATING, False)


async def test_a_request_of_nobody_that_names_a_slot_is_pinned_lest_it_runs_there_beside_another() -> None:
    assert (await called({"messages": [], "id_slot": 1})).reach is Reach.PINNED


@pytest.mark.parametrize(
    "headers",
    [{"X-KVProxy-Bypass": "1"}, {"X-KVProxy-Purpose": "auxiliary"}, NAMED | {"X-KVProxy-Bypass": "1"}],
)
async def test_a_request_that_says_it_owns_nothing_gets_a_slot_of_our_choice(headers: dict[str, str]) -> None:
    call = await called(None, headers)
    assert (call.reach, call.is_owner) == (Reach.PINNED, False)


SAID = {"messages": [{"role": "user", "content": "hi"}]}


async def test_a_conversation_without_an_id_is_known_by_what_it_says() -> None:
    call = await called(SAID)
    assert (call.client, call.reach, call.is_owner, call.is_anonymous) == (None, Reach.PINNED, True, False)
    assert call.reading is not None
    assert call.reading.is_recognisable


async def test_where_that_is_turned_off_such_a_request_is_nobodys() -> None:
    call = await called(SAID, is_implicit=False)
    assert (call.reach, call.is_owner, call.is_anonymous) == (Reach.FLOATING, False, True)


async def test_an_id_in_the_body_names_a_conversation_too() -> None:
    assert (await called({**SAID, "session_id": "chat-1"})).client == ClientId("body.session_id", "chat-1")


async def test_each_key_has_conversations_of_its_own_where_there_are_several() -> None:
    sent = NAMED | {"Authorization": "Bearer one"}
    assert (await called(SAID, sent)).tenant == ""
    assert (await called(SAID, sent, has_tenants=True)).tenant != ""


async def test_bypass_and_auxiliary_are_told_apart() -> None:
    bypass, auxiliary = (
        await called(None, NAMED | {"X-KVProxy-Bypass": "1"}),
        await called(None, NAMED | {"X-KVProxy-Purpose": "auxiliary"}),
    )
    assert (bypass.is_bypass, bypass.is_auxiliary) == (True, False)
    assert (auxiliary.is_bypass, auxiliary.is_auxiliary) == (False, True)


async def test_one_that_wants_nothing_reused_owns_nothing() -> None:
    call = await called({"messages": [], "cache_prompt": False}, NAMED)
    assert (call.is_owner, call.is_auxiliary) == (False, True)
    assert (await called({"messages": [], "cache_prompt": True}, NAMED)).is_owner


async def test_a_client_may_forbid_the_disk_for_its_conversation() -> None:
    assert not (await called(None, NAMED | {"X-KVProxy-Persist": "no"})).may_persist


async def test_a_request_for_several_answers_needs_several_slots() -> None:
    assert (await called({"messages": [], "n": 2}, NAMED)).reach is Reach.EXCLUSIVE


@pytest.mark.parametrize("body", [b"not json", b"[]", b""])
async def test_what_cannot_be_read_goes_on_as_it_is_to_a_slot_of_the_servers_choice(body: bytes) -> None:
    call = await called(body, NAMED)
    assert (call.reach, call.body) == (Reach.FLOATING, body)


async def test_an_encoded_body_is_not_looked_into() -> None:
    call = await called(gzip.compress(b'{"messages":[]}'), NAMED | {"Content-Encoding": "gzip"})
    assert call.reach is Reach.FLOATING


async def test_a_body_that_is_only_called_encoded_may_be_read_by_the_server() -> None:
    call = await called(b'{"messages":[]}', NAMED | {"Content-Encoding": "x"})
    assert call.reach is Reach.EXCLUSIVE


async def test_a_body_over_the_limit_is_refused() -> None:
    with pytest.raises(ReplyError) as caught:
        await called(b"x" * 11, max_bytes=10)
    assert (caught.value.status, caught.value.code) == (413, ErrorCode.BODY_TOO_LARGE)
    assert "server.max_body_bytes" in caught.value.message


async def test_how_a_conversation_opens_is_noted() -> None:
    long = {"messages": [{"role": "system", "content": "x" * WORTH_CHARS}]}
    assert (await called(long, NAMED)).opening is not None
    assert (await called(None, NAMED)).opening is None


async def test_an_endpoint_that_takes_no_slot_of_ours_is_not_pinned_for_a_named_conversation() -> None:
    assert (await called({"messages": []}, NAMED, path="/v1/messages")).reach is Reach.FLOATING


async def test_the_same_request_can_be_sent_without_a_pin() -> None:
    call = await called({"messages": []}, NAMED)
    loose = call.unpinned()
    assert (loose.reach, loose.body, loose.client) == (Reach.FLOATING, call.body, call.client)


async def test_the_limit_that_a_client_sets_its_answer_is_noted() -> None:
    assert (await called({"messages": [], "max_tokens": 50})).answer_limit == 50
    assert (await called()).answer_limit is None


STAMP = "x-anthropic-billing-header: cc_version=2.1.197.bc5; cc_entrypoint=cli; cch=a1b2c;"
STAMPED = {"system": [{"type": "text", "text": STAMP}], "messages": [{"role": "user", "content": "hi"}]}


async def test_a_stamp_is_overwritten_only_where_that_is_wanted() -> None:
    kept = await called(STAMPED, path="/v1/messages")
    assert kept.body == orjson.dumps(STAMPED)
    still = await called(STAMPED, path="/v1/messages", stills_stamp=True)
    assert still.body == kept.body.replace(b"bc5", b"000").replace(b"a1b2c", b"00000")
    # what is known of the request is what the server gets
    assert still.reading is not None
    assert still.reading.document == orjson.loads(still.body)
