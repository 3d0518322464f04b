"""The same turn in another dress is the same turn; another turn is another one."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.dialects.canonical import STAMP, message_bytes, role_of, system_bytes, text_of, tools_bytes

Message = dict[str, Any]

MARK = {"cache_control": {"type": "ephemeral"}}


def user(content: object, **more: Any) -> Message:
    return {"role": "user", "content": content, **more}


def text(words: str, **more: Any) -> Message:
    return {"type": "text", "text": words, **more}


CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": '{"a":1}'}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("a"), text("b")]}
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("hi"), user([text("hi")])),
        (user("hi"), user([text("hi", **MARK)])),
        (user("hi"), user([{"type": "input_text", "text": "hi"}])),
        (user([text("a"), text("b")]), user([text("a"), text("b", **MARK)])),
        (user([RESULT]), user([{**RESULT, **MARK}])),
        (user([{**RESULT, "content": "a"}]), user([{**RESULT, "content": [text("a")]}])),
        (ITEM, {**ITEM, "id": "msg_1", "status": "completed"}),
        (ITEM, {**ITEM, "content": [{**ITEM["content"][0], "annotations": [], "logprobs": []}]}),  # type: ignore[index]
        (
            {"role": "assistant", "content": "yes"},
            {"role": "assistant", "content": "yes", "reasoning_content": "hm", "refusal": None},
        ),
        (
            {"role": "assistant", "content": [USE]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, USE]},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "call_9", "index": 0}]},
        ),
        ({"content": "hi", "role": "user"}, {"role": "user", "content": "hi"}),
    ],
)
def test_what_is_no_part_of_the_prompt_makes_no_difference(one: Message, other: Message) -> None:
    assert message_bytes(one) == message_bytes(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("hi"), user("ho")),
        (user("hi"), user("hi ")),
        (user([text("a"), text("b")]), user([text("ab")])),
        (user([text("a"), text("b")]), user([text("b"), text("a")])),
        (user([PICTURE]), user([{**PICTURE, "image_url": {"url": "data:image/png;base64,BBBB"}}])),
        (user([RESULT]), user([{**RESULT, "content": [text("a"), text("c")]}])),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "rm"}}]},
        ),
        ({"role": "tool", "content": ""}, {"role": "tool", "content": "", "tool_call_id": "call_1"}),
        (
            {"type": "function_call", "name": "ls", "arguments": "{}"},
            {"type": "function_call", "name": "ls", "arguments": "[]"},
        ),
    ],
)
def test_what_is_prompt_makes_a_difference(one: Message, other: Message) -> None:
    assert message_bytes(one) != message_bytes(other)


def test_half_a_surrogate_pair_and_endless_numbers_are_told_apart_too() -> None:
    assert message_bytes(user("\ud800")) != message_bytes(user("\ud801"))
    assert message_bytes(user([{"n": 1 << 80}])) != message_bytes(user([{"n": 1 << 81}]))


@pytest.mark.parametrize(
    ("message", "role"),
    [
        ({"role": "user"}, "user"),
        ({"type": "message", "role": "developer"}, "developer"),
        ({"type": "function_call"}, "assistant"),
        ({"type": "function_call_output"}, "tool"),
        ({"type": "reasoning", "id": "rs_1"}, None),
        ({"type": "web_search_call"}, "item"),
        ({"role": 7}, "item"),
        ({}, "item"),
    ],
)
def test_who_says_it_is_told_by_the_role_or_by_what_kind_of_item_it_is(
    message: Message, role: str | None
) -> None:
    assert role_of(message) == role


def test_the_stamp_of_claude_code_is_no_part_of_the_system_prompt() -> None:
    prompt = [text("You are a helper.", **MARK)]
    stamps = [text(f"{STAMP} cc_version=2.1.{n}; cch={n}0;") for n in (1, 2)]
    said = {system_bytes([*stamp, *prompt]) for stamp in ([stamps[0]], [stamps[1]], [])}
    assert said == {system_bytes("You are a helper.")} == {system_bytes(f"{STAMP} x;\nYou are a helper.")}


@pytest.mark.parametrize("system", [None, "", [], [text("")], f"{STAMP} cch=12345;"])
def test_a_system_prompt_of_nothing_is_nothing(system: object) -> None:
    assert system_bytes(system) == b""


def test_tools_count_in_their_order_and_without_marks() -> None:
    one, two = {"name": "a", "input_schema": {"id": 1}}, {"name": "b"}
    assert tools_bytes([one, {**two, **MARK}]) == tools_bytes([one, two]) != tools_bytes([two, one])
    assert tools_bytes([one]) != tools_bytes([{**one, "input_schema": {"id": 2}}])


def test_the_words_of_a_message_are_its_texts_alone() -> None:
    assert text_of([text("a"), PICTURE, RESULT, "b"]) == "a\nb"
    assert text_of("a") == "a"
    assert text_of(None) == text_of(7) == ""


@pytest.mark.parametrize("odd", [[], {}, 1, None, True], ids=str)
def test_a_kind_that_is_no_word_is_no_kind(odd: object) -> None:
    assert role_of({"type": odd, "content": "hi"}) == "item"
    assert role_of({"type": odd, "role": "user"}) == "user"
    assert message_bytes(user([{"type": odd, "text": "hi"}, text("there")]))
    assert text_of([{"type": odd, "text": "hi"}, text("there")]) == "there"
