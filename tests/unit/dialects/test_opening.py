from __future__ import annotations

import pytest

from kvproxy.dialects.opening import opening_of
from kvproxy.dialects.reading import Reading, read

LONG = "You are a helpful agent. " * 100


def chat(system: object, user: str = "hello") -> Reading:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return read("chat/completions", {"messages": messages})


def asked(*questions: str) -> Reading:
    return read("chat/completions", {"messages": [{"role": "user", "content": text} for text in questions]})


def test_two_chats_with_the_same_long_system_prompt_open_alike() -> None:
    assert opening_of(chat(LONG, "a")) == opening_of(chat(LONG, "b")) is not None


def test_another_system_prompt_opens_differently() -> None:
    assert opening_of(chat(LONG)) != opening_of(chat("Another. " + LONG))


def test_questions_about_the_same_long_text_open_alike() -> None:
    assert opening_of(asked(LONG + "Who?")) == opening_of(asked(LONG + "Why?")) is not None
    assert opening_of(chat("short", LONG + "Who?")) == opening_of(chat("short", LONG + "Why?")) is not None
    assert opening_of(chat("short", LONG)) != opening_of(chat("other", LONG))


def test_content_parts_open_like_the_text_they_hold() -> None:
    assert opening_of(chat([{"type": "text", "text": LONG}])) == opening_of(chat(LONG))


def test_the_dialects_open_alike() -> None:
    system = [{"type": "text", "text": LONG}]
    spoken = read("messages", {"system": system, "messages": [{"role": "user", "content": "a"}]})
    given = read("responses", {"instructions": LONG, "input": "b"})
    assert opening_of(spoken) == opening_of(given) == opening_of(chat(LONG))


def test_raw_prompts_that_begin_alike_open_alike() -> None:
    one, other = (read("completion", {"prompt": LONG + end}) for end in ("one", "two"))
    assert opening_of(one) == opening_of(other) is not None


@pytest.mark.parametrize(
    "reading",
    [
        None,
        read("chat/completions", {}),
        chat("short"),
        read("chat/completions", {"messages": ["not a message"]}),
        chat(None),
        read("completion", {"prompt": [1, 2, 3]}),
        read("embeddings", {"input": LONG}),
    ],
)
def test_few_words_are_no_opening(reading: Reading | None) -> None:
    assert opening_of(reading) is None
