from __future__ import annotations

from typing import Any

import pytest

from kvproxy.settings.overrides import Override, apply, from_assignment, from_environment


def applied(document: dict[str, Any], *texts: str) -> dict[str, Any]:
    assert list(apply(document, [from_assignment(text) for text in texts])) == []
    return document


def test_a_variable_names_section_and_key() -> None:
    (override,) = from_environment({"KVPROXY_CHECKPOINT__MIN_TOKENS": "9", "PATH": "/bin"})
    assert override == Override(("checkpoint", "min_tokens"), "9", "KVPROXY_CHECKPOINT__MIN_TOKENS")


def test_list_entries_come_in_the_order_of_their_numbers() -> None:
    names = {f"KVPROXY_UPSTREAMS__{n}__NAME": "x" for n in (10, 2, 0)}
    assert [override.path[1] for override in from_environment(names)] == ["0", "2", "10"]


def test_what_kubernetes_and_the_tests_set_is_no_setting() -> None:
    foreign = {
        "KVPROXY_SERVICE_HOST": "10.0.0.1",
        "KVPROXY_SERVICE_PORT": "80",
        "KVPROXY_SERVICE_PORT_HTTP": "80",
        "KVPROXY_PORT": "tcp://10.0.0.1:80",
        "KVPROXY_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVPROXY_TEST_LLAMA_SERVER": "/bin/llama-server",
    }
    assert from_environment(foreign) == ()


@pytest.mark.parametrize("text", ["", "a.b", "=3"])
def test_an_assignment_needs_key_and_equals_sign(text: str) -> None:
    with pytest.raises(ValueError, match=r"a\.b=VALUE"):
        from_assignment(text)


def test_a_text_setting_takes_the_value_as_it_is_written() -> None:
    document = applied({}, "admin.token=0123", "upstreams.0.api_key=a: b # c", "logging.level=warning")
    assert document["admin"]["token"] == "0123"
    assert document["upstreams"][0]["api_key"] == "a: b # c"
    assert document["logging"]["level"] == "warning"


def test_every_other_setting_is_read_as_yaml() -> None:
    document = applied(
        {},
        "checkpoint.on_turn=true",
        "sessions.headers=[x-a, x-b]",
        "upstreams.0.slots=[0]",
        "queue.max_waiting=3",
    )
    assert document["checkpoint"]["on_turn"] is True
    assert document["sessions"]["headers"] == ["x-a", "x-b"]
    assert document["upstreams"][0]["slots"] == [0]
    assert document["queue"]["max_waiting"] == 3


@pytest.mark.parametrize("null", ["null", "~", ""])
def test_null_unsets(null: str) -> None:
    document = applied({"admin": {"token": "t"}}, f"admin.token={null}", f"retention.max_age_days={null}")
    assert document == {"admin": {"token": None}, "retention": {"max_age_days": None}}


def test_keys_beside_the_overridden_one_stay() -> None:
    document = applied({"queue": {"max_waiting": 1, "max_wait_seconds": 2}}, "queue.max_waiting=3")
    assert document == {"queue": {"max_waiting": 3, "max_wait_seconds": 2}}


def test_an_empty_section_of_the_file_can_be_filled() -> None:
    assert applied({"queue": None}, "queue.max_waiting=3") == {"queue": {"max_waiting": 3}}


@pytest.mark.parametrize(
    ("document", "text", "reason"),
    [
        ({}, "upstreams.1.name=b", "the next is 0"),
        ({"upstreams": []}, "upstreams.name=b", "the next is 0"),
        ({"server": 3}, "server.listen=x:1", "below a plain value"),
        ({}, "checkpoint.min_tokens=[", "YAML"),
    ],
)
def test_an_override_that_cannot_be_written_is_told_with_its_source(
    document: dict[str, Any], text: str, reason: str
) -> None:
    ((override, told),) = apply(document, [from_assignment(text)])
    assert override.source.startswith("--set ")
    assert reason in told
