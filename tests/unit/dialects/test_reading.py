"""What a request says, wherever its endpoint keeps it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from kvproxy.dialects.reading import BLOCK_BYTES, MOST_ENTRIES, Reading, read

HEAD = {"role": "system", "content": "You are a helper."}
TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "image_url", "image_url": {}}]},
]
TOOLS = [{"type": "function", "function": {"name": "ls"}}]
STATIC = "x" * BLOCK_BYTES


def chat(*messages: Any, **more: Any) -> Reading:
    return read("chat/completions", {"messages": list(messages), **more})


def test_a_chat_is_its_head_and_then_its_messages() -> None:
    reading = chat(HEAD, *TURNS, tools=TOOLS, chat_template_kwargs={"enable_thinking": False})
    assert reading.roles == ("options", "tools", "system", "user", "assistant", "user")
    assert reading.head == 3
    assert len(set(reading.digests)) == 6
    assert reading.sizes[2:5] == (len(json.dumps(HEAD["content"])), 3, 3)
    assert reading.has_tools
    assert reading.is_recognisable


def test_the_same_turns_are_the_same_whichever_endpoint_they_go_to() -> None:
    asked = chat(HEAD, *TURNS[:2])
    items = [{"type": "message", **turn, "id": "msg"} for turn in TURNS[:2]]
    given = read("responses", {"instructions": HEAD["content"], "input": items})
    spoken = read("messages", {"system": [{"type": "text", "text": HEAD["content"]}], "messages": TURNS[:2]})
    assert asked.digests == given.digests == spoken.digests
    assert read("responses", {"input": "one"}).digests == chat(TURNS[0]).digests


def test_a_longer_chat_begins_with_the_entries_of_a_shorter_one() -> None:
    short, long = chat(HEAD, TURNS[0]), chat(HEAD, *TURNS)
    assert long.digests[:2] == short.digests


def test_a_body_of_any_number_of_turns_has_so_many_entries_and_no_more() -> None:
    many = [{"role": "user", "content": str(n)} for n in range(MOST_ENTRIES + 9)]
    assert len(chat(*many).digests) == MOST_ENTRIES
    assert len(read("completion", {"prompt": STATIC * (MOST_ENTRIES + 9)}).digests) == MOST_ENTRIES


def test_who_says_it_counts() -> None:
    assert chat({"role": "user", "content": "a"}).digests != chat({"role": "tool", "content": "a"}).digests


def test_a_system_message_after_the_first_turn_is_a_turn() -> None:
    reading = read("messages", {"system": "s", "messages": [TURNS[0], {"role": "system", "content": "m"}]})
    assert (reading.roles, reading.head) == (("system", "user", "system"), 1)


def test_reasoning_between_the_items_of_a_response_is_passed_over() -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r"},
        {"role": "user", "content": "b"},
    ]
    assert read("responses", {"input": items}).roles == ("user", "user")


def test_a_raw_prompt_is_its_whole_blocks() -> None:
    one = read("completion", {"prompt": STATIC * 2 + "rest"})
    longer = read("completion", {"prompt": STATIC * 2 + "rest" + STATIC})
    assert (len(one.digests), one.head) == (2, 0)
    assert longer.digests[:2] == one.digests
    assert one.prompt is not None
    assert longer.prompt is not None
    assert longer.prompt.startswith(one.prompt)
    assert read("completions", {"prompt": [STATIC * 2]}).digests == one.digests


def test_token_ids_are_a_raw_prompt_too() -> None:
    ids = list(range(10_000))
    one, longer = (read("completion", {"prompt": ids[:n]}) for n in (5000, 10_000))
    assert one.prompt is not None
    assert longer.prompt is not None
    assert longer.prompt.startswith(one.prompt)
    assert longer.digests[: len(one.digests)] == one.digests


@pytest.mark.parametrize(
    ("label", "document"),
    [
        ("chat/completions", {}),
        ("chat/completions", {"messages": "hi", "tools": "none", "model": 7}),
        ("chat/completions", {"messages": [HEAD]}),
        ("chat/completions", {"messages": [1, None, "x"]}),
        ("completion", {"prompt": "short"}),
        ("completion", {"prompt": {"a": 1}}),
        ("completion", {"prompt": [STATIC, STATIC]}),
        ("infill", {"input_prefix": STATIC}),
        ("embeddings", {"input": STATIC}),
        ("other", {"messages": TURNS}),
    ],
)
def test_what_says_too_little_cannot_be_recognised(label: str, document: dict[str, Any]) -> None:
    reading = read(label, document)
    assert not reading.is_recognisable or document.get("messages") == "hi"


def test_what_is_asked_of_the_answer_is_read_beside() -> None:
    reading = chat(*TURNS, model="m", stream=True, max_tokens=7)
    assert (reading.model, reading.is_stream, reading.max_tokens) == ("m", True, 7)
    plain = chat(*TURNS, stream="true", max_tokens=True)
    assert (plain.model, plain.is_stream, plain.max_tokens) == ("", False, None)
    assert chat(max_completion_tokens=1, max_tokens=9).max_tokens == 1
    assert read("completion", {"n_predict": 0, "max_tokens": 5}).max_tokens == 0
    assert read("responses", {"max_output_tokens": 3}).max_tokens == 3


def test_the_words_of_the_user_and_of_the_system_are_at_hand() -> None:
    reading = chat(HEAD, {"role": "developer", "content": "Be short."}, *TURNS)
    assert reading.system_text == "You are a helper.\nBe short."
    assert reading.first_user_text == "one"
    assert read("responses", {"instructions": "s", "input": "u"}).system_text == "s"
    assert read("responses", {"instructions": "s", "input": "u"}).first_user_text == "u"
    assert chat(HEAD).first_user_text == ""


def test_the_texts_do_not_show_where_a_reading_is_printed() -> None:
    assert "helper" not in repr(chat(HEAD, *TURNS))
    assert STATIC not in repr(read("completion", {"prompt": STATIC}))


WHOLE: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "max_tokens": 5,
    "prompt": ["p"],
    "instructions": "s",
    "system": [{"type": "text", "text": "s"}],
    "tools": [{"type": "function", "function": {"name": "ls"}}],
    "reasoning": {"effort": "low"},
    "messages": [
        HEAD,
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image", "source": {}}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "t"}, {"type": "tool_use", "input": {}}],
            "tool_calls": [{"id": "1", "type": "function", "function": {"arguments": "{}"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "r"}]}]},
    ],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "content": []},
        {"type": "function_call", "arguments": "{}"},
    ],
}
ODD = (None, True, 5, "x", ["x"], {"a": 1}, [["x"]], [{"type": ["x"], "role": {"a": 1}}])


def places(value: Any) -> list[tuple[Any, ...]]:
    """The path of every value in it."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path for key in keys for path in [(key,), *((key, *inner) for inner in places(value[key]))]]


@pytest.mark.parametrize("label", ["chat/completions", "responses", "messages", "completion", "infill"])
def test_a_value_of_any_kind_in_any_place_is_read_without_complaint(label: str) -> None:
    for *way, last in places(WHOLE):
        for odd in ODD:
            document = copy.deepcopy(WHOLE)
            inner = document
            for key in way:
                inner = inner[key]
            inner[last] = odd
            reading = read(label, document)
            texts = (reading.system_text, reading.first_user_text, *reading.user_texts)
            assert all(isinstance(text, str) for text in texts)
            assert len(reading.roles) == len(reading.digests) == len(reading.sizes)


def test_token_ids_beside_anything_are_a_prompt() -> None:
    deep: Any = [1]
    for _ in range(300):
        deep = [deep]
    assert (
        read("completion", {"prompt": [1, 2, deep]}).prompt != read("completion", {"prompt": [1, 2]}).prompt
    )


@pytest.mark.parametrize("odd", [[], {}, 1], ids=str)
def test_a_role_that_is_no_word_ends_the_system_prompts(odd: object) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": odd, "content": "hi"}]
    reading = read("chat/completions", {"messages": messages})
    assert (reading.system_text, reading.roles) == ("be brief", ("system", "item"))
