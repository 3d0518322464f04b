from __future__ import annotations

import pytest

from kvproxy.dialects.opening import opening_of

LONG = "You are a helpful agent. " * 100


def chat(system: object, user: str = "hello") -> dict[str, object]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}


def test_two_chats_with_the_same_long_system_prompt_open_alike() -> None:
    assert opening_of(chat(LONG, "a")) == opening_of(chat(LONG, "b")) is not None


def test_another_system_prompt_opens_differently() -> None:
    assert opening_of(chat(LONG)) != opening_of(chat("Another. " + LONG))


def test_content_parts_open_like_the_text_they_hold() -> None:
    assert opening_of(chat([{"type": "text", "text": LONG}])) == opening_of(chat(LONG))


def test_raw_prompts_that_begin_alike_open_alike() -> None:
    shared = "x" * 9000
    assert opening_of({"prompt": shared + "one"}) == opening_of({"prompt": shared + "two"}) is not None


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        chat("short"),
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": ["not a message"]},
        {"messages": []},
        chat(None),
        chat([LONG]),
        {"prompt": [1, 2, 3]},
    ],
)
def test_what_is_short_or_no_system_prompt_has_no_opening(document: dict[str, object] | None) -> None:
    assert opening_of(document) is None


def test_lone_surrogates_do_not_raise() -> None:
    assert opening_of(chat("\ud800" * 2000)) is not None
