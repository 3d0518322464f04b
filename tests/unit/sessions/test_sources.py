"""The places where clients name a conversation."""

from __future__ import annotations

import pytest

from kvproxy.sessions.sources import BODY_FIELDS, HEADERS, NOT_IDENTITY, PATTERN


def test_nothing_that_names_a_person_a_machine_or_a_request_is_believed() -> None:
    assert not set(HEADERS) & set(NOT_IDENTITY)
    assert not {"user", "safety_identifier", "metadata.promptId"} & set(BODY_FIELDS)
    assert all(name == name.lower() for name in (*HEADERS, *NOT_IDENTITY))


@pytest.mark.parametrize(
    ("header", "meaning"),
    [
        ("x-user-id", "a person"),
        ("x-user-email", "a person"),
        ("x-forwarded-user", "a person"),
        ("x-forwarded-email", "a person"),
        ("x-real-ip", "a machine"),
        ("forwarded", "a machine"),
    ],
)
def test_what_any_proxy_or_gateway_calls_a_person_or_a_machine_is_known_as_such(
    header: str, meaning: str
) -> None:
    assert NOT_IDENTITY[header] == meaning


def test_what_means_one_conversation_comes_before_what_a_tree_of_agents_shares() -> None:
    assert HEADERS[0] == "x-session-id"
    assert HEADERS.index("thread-id") < HEADERS.index("session-id")
    assert BODY_FIELDS[-1] == "prompt_cache_key"


def test_headers_of_no_known_client_are_believed_only_where_it_was_asked_for() -> None:
    assert PATTERN not in HEADERS
