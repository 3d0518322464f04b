from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvproxy.auxiliary.fingerprints import LOOKED_AT_CHARS, Fingerprint, Library
from kvproxy.dialects.reading import Reading, read


def chat(*messages: tuple[str, str], **more: Any) -> Reading:
    said = [{"role": role, "content": content} for role, content in messages]
    return read("chat/completions", {"messages": said, **more})


def fingerprint(where: Any = "system", **more: Any) -> Fingerprint:
    return Fingerprint.model_validate({"client": "some", "where": where, **more})


TITLE = fingerprint(starts="You write titles")


def test_a_wording_at_the_beginning_of_a_system_prompt_is_found() -> None:
    assert Library([TITLE]).find(chat(("system", "  You write titles only."), ("user", "hi"))) is TITLE
    assert Library([TITLE]).find(chat(("system", "Well. You write titles."), ("user", "hi"))) is None
    assert Library([TITLE]).find(chat(("user", "You write titles"))) is None


def test_all_that_a_wording_contains_has_to_be_there() -> None:
    one = fingerprint("only_user", starts="### Task:", contains=["### Output:", "<chat_history>"])
    assert Library([one]).find(chat(("user", "### Task:\nx\n### Output:\ny\n<chat_history>"))) is one
    assert Library([one]).find(chat(("user", "### Task:\nx\n### Output:\ny"))) is None


def test_an_only_message_is_one_to_which_nobody_has_replied() -> None:
    one = fingerprint("only_user", starts="### Task:")
    assert Library([one]).find(chat(("system", "be kind"), ("user", "### Task: a"))) is one
    assert Library([one]).find(chat(("user", "### Task: a"), ("assistant", "b"))) is None
    assert Library([one]).find(chat(("user", "### Task: a"), ("user", "b"))) is None


def test_a_last_message_may_follow_a_whole_conversation() -> None:
    one = fingerprint("last_user", contains=["Generate a title"])
    assert Library([one]).find(chat(("user", "hi"), ("assistant", "ho"), ("user", "Generate a title"))) is one
    assert (
        Library([one]).find(chat(("user", "Generate a title"), ("assistant", "ho"), ("user", "thanks")))
        is None
    )


def test_a_bound_on_the_answer_has_to_be_asked_for() -> None:
    one = fingerprint("only_user", starts="name this chat", max_tokens=16)
    assert Library([one]).find(chat(("user", "name this chat"), max_tokens=16)) is one
    assert Library([one]).find(chat(("user", "name this chat"), max_tokens=17)) is None
    assert Library([one]).find(chat(("user", "name this chat"))) is None


def test_the_system_prompt_is_found_wherever_its_dialect_has_it() -> None:
    messages = [{"role": "user", "content": "hi"}]
    blocks = [{"type": "text", "text": "You write titles"}]
    assert Library([TITLE]).find(read("messages", {"system": blocks, "messages": messages})) is TITLE
    assert (
        Library([TITLE]).find(read("responses", {"instructions": "You write titles", "input": "hi"})) is TITLE
    )


def test_only_the_beginning_of_a_text_is_looked_at() -> None:
    one = fingerprint("last_user", contains=["Generate a title"])
    assert Library([one]).find(chat(("user", "x" * LOOKED_AT_CHARS + "Generate a title"))) is None


def test_the_first_that_fits_is_told() -> None:
    other = fingerprint(contains=["titles only"])
    assert Library([other, TITLE]).find(chat(("system", "You write titles only."))) is other


@pytest.mark.parametrize(
    "entry",
    [
        {"where": "system"},
        {"where": "system", "starts": "short"},
        {"where": "nowhere", "starts": "long enough"},
        {"where": "system", "starts": "long enough", "weight": 3},
        {"where": "system", "contains": "not a list of phrases"},
    ],
)
def test_an_entry_that_would_fit_anything_or_nothing_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Fingerprint.model_validate({"client": "some", **entry})
