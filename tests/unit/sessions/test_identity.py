"""Which conversation a request says it belongs to, and when it says nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from multidict import CIMultiDict

from kvproxy.sessions.identity import MAX_ID_BYTES, NOBODY, Identity, Sources, identify, tenant_of
from kvproxy.sessions.key import ClientId
from kvproxy.sessions.sources import BODY_FIELDS, HEADERS, PATTERN

ALL = Sources(HEADERS, BODY_FIELDS)
UUID = "66c9f377-5ac9-4826-88c4-fc2c24de2017"


def told(*headers: tuple[str, str], body: dict[str, Any] | None = None, sources: Sources = ALL) -> Identity:
    return identify(CIMultiDict(headers), {} if body is None else body, sources)


def client_of(*headers: tuple[str, str], **more: Any) -> ClientId | None:
    return told(*headers, **more).client


def test_a_request_that_names_no_conversation_is_nobodys() -> None:
    assert told(("Accept", "*/*"), ("User-Agent", "x"), body={"user": "me"}) == NOBODY
    assert identify(CIMultiDict(), None, ALL) == NOBODY


@pytest.mark.parametrize("later", range(1, len(HEADERS)))
def test_the_first_header_that_is_there_decides(later: int) -> None:
    fits = {"thread-id": "t", "x-codex-turn-metadata": '{"thread_id":"t"}', "session-id": "s"}
    sent = [(name.upper(), fits.get(name, "v")) for name in (HEADERS[later], HEADERS[0])]
    assert client_of(*sent) == ClientId("x-session-id", "v")


@pytest.mark.parametrize(
    "value", ["", "   ", "a\tb", "a\x00b", "a\x7fb", "x" * (MAX_ID_BYTES + 1), "é" * (MAX_ID_BYTES // 2 + 1)]
)
def test_an_unfit_id_means_no_conversation_and_not_the_next_place(value: str) -> None:
    assert told(("X-Session-Id", value), ("x-session-affinity", "two"), body={"session_id": "3"}) == NOBODY
    assert told(body={"session_id": value, "prompt_cache_key": "two"}) == NOBODY


def test_an_id_may_be_as_long_as_the_limit_and_any_text() -> None:
    assert client_of(("X-Session-Id", "x" * MAX_ID_BYTES)) is not None
    assert client_of(("X-Session-Id", " größe \udcff ")) == ClientId("x-session-id", "größe \udcff")


def test_two_different_values_mean_no_conversation_and_the_same_twice_is_one() -> None:
    assert client_of(("X-Session-Id", "one"), ("X-Session-Id", "two")) is None
    assert client_of(("X-Session-Id", "one"), ("X-Session-Id", "one")) == ClientId("x-session-id", "one")


def test_equal_values_of_two_clients_are_two_conversations() -> None:
    assert client_of(("agent-session-id", "1")) != client_of(("x-affinity", "1"))


def test_claude_codes_agents_are_told_apart_within_their_session() -> None:
    session = ("X-Claude-Code-Session-Id", UUID)
    main, agent = told(session), told(session, ("x-claude-code-agent-id", "a1"))
    nested = told(session, ("x-claude-code-agent-id", "a2"), ("x-claude-code-parent-agent-id", "a1"))
    assert main.client == agent.client == nested.client == ClientId("x-claude-code-session-id", UUID)
    assert (main.agent, main.parent) == ("", None)
    assert (agent.agent, agent.parent, agent.parent_agent) == ("a1", main.client, "")
    assert (nested.agent, nested.parent, nested.parent_agent) == ("a2", main.client, "a1")


def test_a_codex_thread_is_a_thread_only_among_codexs_other_headers() -> None:
    assert client_of(("thread-id", "t")) is None
    for beside in ("session-id", "originator", "x-codex-window-id"):
        assert client_of(("thread-id", "t"), (beside, "s")) == ClientId("thread-id", "t")


def test_a_codex_thread_is_the_same_wherever_it_is_told() -> None:
    thread = ClientId("thread-id", "t")
    assert client_of(("x-codex-turn-metadata", '{"thread_id":"t","turn_id":"u"}')) == thread
    assert client_of(body={"client_metadata": {"thread_id": "t", "session_id": "s"}}) == thread
    assert client_of(("x-codex-turn-metadata", "{broken"), ("session-id", "s")) == ClientId("session-id", "s")


def test_a_child_thread_names_the_thread_it_comes_from() -> None:
    child = [("thread-id", "c"), ("session-id", "s")]
    assert told(*child, ("x-codex-parent-thread-id", "t")).parent == ClientId("thread-id", "t")
    forked = told(*child, ("x-codex-turn-metadata", '{"forked_from_thread_id":"f"}'))
    assert forked.parent == ClientId("thread-id", "f")


def test_a_child_session_names_its_parent_in_the_same_way() -> None:
    child = told(("x-session-id", "c"), ("x-parent-session-id", "p"))
    assert (child.client, child.parent) == (ClientId("x-session-id", "c"), ClientId("x-session-id", "p"))


def test_the_temporary_chats_of_a_tab_are_not_one_conversation() -> None:
    assert client_of(("X-OpenWebUI-Chat-Id", "local:abc")) is None
    assert client_of(("X-OpenWebUI-Chat-Id", "abc")) == ClientId("x-openwebui-chat-id", "abc")


def test_a_resumable_stream_is_read_without_its_model() -> None:
    assert client_of(("X-Conversation-Id", "abc::model")) == ClientId("x-conversation-id", "abc")


@pytest.mark.parametrize(
    ("user", "session"),
    [
        (json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID}), UUID),
        (f"user_{'0' * 64}_account__session_{UUID}", UUID),
        ("someone@example.org", None),
        (UUID, None),
        ('{"device_id":"d"}', None),
        ("{", None),
        (7, None),
    ],
)
def test_a_users_id_counts_only_where_it_holds_a_session(user: object, session: str | None) -> None:
    expected = None if session is None else ClientId("x-claude-code-session-id", session)
    assert client_of(body={"metadata": {"user_id": user}}) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"session_id": "a", "prompt_cache_key": "b"}, ("body.session_id", "a")),
        ({"session_id": 17}, ("body.session_id", "17")),
        ({"session_id": True, "prompt_cache_key": "b"}, ("body.prompt_cache_key", "b")),
        ({"session_id": None, "prompt_cache_key": "b"}, ("body.prompt_cache_key", "b")),
        ({"metadata": {"thread_id": "t"}}, ("body.metadata.thread_id", "t")),
        ({"conversation": "c"}, ("body.conversation", "c")),
        ({"conversation": {"id": "c"}}, ("body.conversation.id", "c")),
        ({"metadata": "none"}, None),
    ],
)
def test_the_body_is_asked_when_no_header_was_there(body: dict[str, Any], expected: Any) -> None:
    client = client_of(body=body)
    assert client == (None if expected is None else ClientId(*expected))


def test_a_header_wins_over_the_body_and_a_contradiction_is_told() -> None:
    identity = told(("X-Session-Id", "a"), body={"session_id": "b"})
    assert (identity.client, identity.is_disputed) == (ClientId("x-session-id", "a"), True)
    assert not told(("X-Session-Id", "a"), body={"session_id": "a"}).is_disputed
    assert not told(("X-Session-Id", "a"), body={"prompt_cache_key": "b"}).is_disputed


def test_only_what_is_configured_is_read() -> None:
    sources = Sources(("x-chat",), ("chat.id",))
    sent = [("x-session-id", "a"), ("x-chat", "b")]
    assert client_of(*sent, sources=sources) == ClientId("x-chat", "b")
    assert client_of(body={"chat": {"id": "c"}}, sources=sources) == ClientId("body.chat.id", "c")


def test_any_session_header_counts_where_that_was_asked_for() -> None:
    open_to_all = Sources((*HEADERS, PATTERN))
    assert client_of(("X-Acme-Session-Id", "abcdefgh")) is None
    assert client_of(("X-Acme-Session-Id", "abcdefgh"), sources=open_to_all) == ClientId(
        "x-acme-session-id", "abcdefgh"
    )
    for name, value in (("X-Acme-Session-Id", "short"), ("x-parent-session-id", "abcdefgh")):
        assert client_of((name, value), sources=open_to_all) is None


def test_whose_key_it_is_is_told_without_the_key() -> None:
    bearer = tenant_of(CIMultiDict({"Authorization": "Bearer secret"}))
    assert bearer == tenant_of(CIMultiDict({"X-Api-Key": "secret"}))
    assert bearer != tenant_of(CIMultiDict({"X-Api-Key": "other"}))
    assert "secret" not in bearer
    assert tenant_of(CIMultiDict()) == ""
