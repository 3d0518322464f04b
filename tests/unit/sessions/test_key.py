from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.identifiers import ServerName
from kvproxy.sessions.key import (
    ClientId,
    derive_key,
    digest_of,
    forbids_persistence,
    is_declared_auxiliary,
    wants_bypass,
)

MAIN = ServerName("main")


def test_a_key_is_the_same_after_any_restart() -> None:
    client = ClientId("x-session-id", "one")
    assert derive_key(MAIN, "", "/m.gguf", client) == "674e28e7930fe582ef000c5002662519"


parts = st.tuples(*[st.text(max_size=6)] * 6)


@given(st.lists(parts, min_size=2, max_size=6, unique=True))
def test_different_conversations_have_different_keys(conversations: list[tuple[str, ...]]) -> None:
    keys = [
        derive_key(ServerName(server), tenant, model, ClientId(namespace, value), branch)
        for server, tenant, model, namespace, value, branch in conversations
    ]
    assert all(one != other for one, other in combinations(keys, 2))
    assert all(len(key) == 32 and set(key) <= set("0123456789abcdef") for key in keys)


def test_no_two_parts_run_together() -> None:
    one = derive_key(MAIN, "ab", "c", ClientId("n", "v"))
    assert one != derive_key(MAIN, "a", "bc", ClientId("n", "v"))


def test_an_operator_finds_a_session_by_the_digest_of_its_clients_id() -> None:
    assert ClientId("x-session-id", "one").digest == digest_of("one")
    assert len(digest_of("one\udcff")) == 32


@pytest.mark.parametrize(("value", "expected"), [("1", True), (" 1 ", True), ("0", False), ("true", False)])
def test_bypass_is_asked_for_by_a_one(value: str, expected: bool) -> None:
    assert wants_bypass({"X-KVProxy-Bypass": value}) is expected
    assert not wants_bypass({})


@pytest.mark.parametrize(("value", "expected"), [("auxiliary", True), ("Auxiliary ", True), ("main", False)])
def test_an_auxiliary_request_says_so(value: str, expected: bool) -> None:
    assert is_declared_auxiliary({"X-KVProxy-Purpose": value}) is expected
    assert not is_declared_auxiliary({})


@pytest.mark.parametrize(("value", "expected"), [("no", True), ("NO", True), ("yes", False), ("", False)])
def test_a_client_may_forbid_the_disk(value: str, expected: bool) -> None:
    assert forbids_persistence({"X-KVProxy-Persist": value}) is expected
    assert not forbids_persistence({})
