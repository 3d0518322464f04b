from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.dialects.reading import read
from kvproxy.dialects.stamp import without_changes

OLD = "x-anthropic-billing-header: cc_version=2.1.100.e3b; cc_entrypoint=cli; cch=a1b2c;"
NEW = "x-anthropic-billing-header: cc_version=2.1.197.96b; cc_entrypoint=sdk-cli; cc_is_subagent=true;"
USER = [{"role": "user", "content": "hi"}]


def frozen(label: str, **document: Any) -> Any:
    body = json.dumps(document).encode()
    out = without_changes(body, read(label, document).system_text)
    assert len(out) == len(body)
    return json.loads(out)


def blocks(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("stamp", "still"),
    [
        (OLD, "x-anthropic-billing-header: cc_version=2.1.100.000; cc_entrypoint=cli; cch=00000;"),
        (NEW, NEW.replace("96b", "000")),
    ],
)
def test_what_changes_in_a_stamp_is_made_the_same_for_all(stamp: str, still: str) -> None:
    out = frozen("messages", system=blocks(stamp, "You are Claude"), messages=USER)
    assert out == {"system": blocks(still, "You are Claude"), "messages": USER}


def test_it_is_found_in_a_system_prompt_that_is_one_text() -> None:
    out = frozen("messages", system=f"{OLD}\nYou are Claude", messages=USER)
    assert out["system"].startswith("x-anthropic-billing-header: cc_version=2.1.100.000;")
    assert out["system"].endswith("cch=00000;\nYou are Claude")


def test_it_is_found_on_other_routes() -> None:
    messages = [{"role": "system", "content": OLD}, *USER]
    out = frozen("chat/completions", messages=messages)
    assert "cch=00000" in out["messages"][0]["content"]


def test_a_quoted_stamp_is_nobodys_business() -> None:
    quoted = {"messages": [{"role": "user", "content": OLD}]}
    assert frozen("messages", **quoted) == quoted
    both = {"system": blocks(OLD), "messages": [{"role": "user", "content": OLD}]}
    assert frozen("messages", **both) == both
    inside = {"system": blocks(OLD), "messages": [{"role": "user", "content": f"what is {OLD}?"}]}
    assert frozen("messages", **inside)["messages"] == inside["messages"]


def test_everything_else_keeps_its_bytes() -> None:
    body = b'{"a":1e3, "system" : [{"text":"%b","type":"text"}],"messages":[],"a":"cch=abc"}' % OLD.encode()
    out = without_changes(body, OLD)
    assert out == body.replace(b"e3b", b"000").replace(b"a1b2c", b"00000")


def test_a_body_without_a_stamp_is_the_same_object() -> None:
    body = b'{"messages":[]}'
    assert without_changes(body, "You are Claude") is body
