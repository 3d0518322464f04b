from __future__ import annotations

from typing import Any

import pytest

from kvproxy.boundary.continuations import Ending, NoBoundary, Reason, continuations
from kvproxy.dialects.as_chat import CHAT, as_chat


def chat_of(label: str, document: dict[str, Any]) -> dict[str, Any]:
    chat = as_chat(label, document)
    assert not isinstance(chat, NoBoundary), chat
    return dict(chat)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_chat_stays_as_it_is() -> None:
    document = {"messages": [], "anything": 1}
    assert as_chat(CHAT, document) is document


@pytest.mark.parametrize("label", ["completion", "completions", "infill", "other"])
def test_what_no_template_renders_has_no_chat(label: str) -> None:
    assert as_chat(label, {"prompt": "x"}) == NoBoundary(Reason.DIALECT, label)


def test_responses_of_one_string_become_one_question() -> None:
    chat = chat_of("responses", {"input": "hi", "instructions": "be kind", "max_output_tokens": 5})
    assert chat == {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]}


def test_responses_items_become_messages_and_those_of_one_reply_become_one() -> None:
    chat = chat_of(
        "responses",
        {
            "input": [
                {
                    "type": "message",
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "rules"}],
                },
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
                {"type": "function_call", "call_id": "c2", "name": "find", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "blue"},
                {
                    "type": "function_call_output",
                    "call_id": "c2",
                    "output": [{"type": "input_text", "text": "gone"}],
                },
            ]
        },
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "find", "arguments": "{}"}},
    ]
    assert chat["messages"] == [
        {"role": "developer", "content": [text("rules")]},
        {"role": "user", "content": [text("hi")]},
        {"role": "assistant", "content": [text("so")], "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        {"role": "tool", "tool_call_id": "c2", "content": [text("gone")]},
    ]


def test_a_responses_call_without_words_has_no_content() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    chat = chat_of("responses", {"input": [{"role": "user", "content": "hi"}, call]})
    assert "content" not in chat["messages"][1]


def test_of_a_responses_reasoning_the_server_reads_the_first_part() -> None:
    parts = [{"type": "reasoning_text", "text": "hm"}, {"type": "reasoning_text", "text": "well"}]
    chat = chat_of("responses", {"input": [{"type": "reasoning", "summary": [], "content": parts}]})
    assert chat["messages"] == [{"role": "assistant", "content": [], "reasoning_content": "hm"}]


def test_responses_tools_lose_what_has_no_counterpart_and_the_rest_is_carried_over() -> None:
    tools = [
        {"type": "web_search"},
        {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}},
    ]
    fields = {"tool_choice": "auto", "parallel_tool_calls": False, "chat_template_kwargs": {"a": 1}}
    chat = chat_of("responses", {"input": "hi", "tools": tools, "reasoning": {"effort": "low"}, **fields})
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["reasoning_effort"] == "low"
    assert {key: chat[key] for key in fields} == fields
    only_search = chat_of("responses", {"input": "hi", "tools": tools[:1]})
    assert "tools" not in only_search


@pytest.mark.parametrize(
    "given",
    [
        None,
        [1],
        [{"type": "item_reference", "id": "x"}],
        [{"role": "assistant", "content": "no type"}],
        [{"role": "user", "content": 1}],
        [{"type": "reasoning", "summary": [], "content": None}],
    ],
)
def test_responses_that_the_server_would_refuse_have_no_chat(given: object) -> None:
    outcome = as_chat("responses", {"input": given})
    assert isinstance(outcome, NoBoundary)
    assert outcome.reason is Reason.UNREADABLE


def test_a_picture_is_still_seen_to_be_none_in_any_dialect() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "x"}
    image = {"type": "image", "source": source}
    documents = [
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}),
        ("messages", {"messages": [{"role": "user", "content": [image]}]}),
        (
            "messages",
            {
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "user", "content": [{"type": "tool_result", "content": [image]}]},
                ]
            },
        ),
    ]
    for label, document in documents:
        assert continuations(chat_of(label, document), Ending.TEXT) == NoBoundary(Reason.MEDIA)


def test_messages_blocks_become_text_reasoning_calls_and_results() -> None:
    chat = chat_of(
        "messages",
        {
            "system": [text("be "), {"type": "image"}, {**text("kind"), "cache_control": {}}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        text("so"),
                        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "ä", "n": 1.5}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text("b")]},
                        {"type": "tool_result", "tool_use_id": "t2"},
                        text("go on"),
                    ],
                },
            ],
        },
    )
    function = {"name": "look", "arguments": '{"at":"ä","n":1.5}'}
    assert chat["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [text("so")],
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            "reasoning_content": "hm",
        },
        {"role": "user", "content": [text("go on")]},
        {"role": "tool", "tool_call_id": "t1", "content": "ab"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
    ]


def test_messages_without_a_word_leave_no_message() -> None:
    nothing = [{"role": "assistant"}, {"role": "assistant", "content": []}]
    chat = chat_of("messages", {"messages": [{"role": "user", "content": "hi"}, *nothing]})
    assert chat["messages"] == [{"role": "user", "content": "hi"}]


def test_a_reply_of_thoughts_or_calls_alone_has_an_empty_text() -> None:
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}
    chat = chat_of("messages", {"messages": [thought]})
    assert chat["messages"] == [{"role": "assistant", "content": "", "reasoning_content": "hm"}]


@pytest.mark.parametrize(
    ("system", "rendered"),
    [
        (
            "x-anthropic-billing-header: v=2; cch=a5145;You help",
            "x-anthropic-billing-header: v=2; cch=fffff;You help",
        ),
        ("x-anthropic-billing-header: v=2; cch=a5;You help",) * 2,
        ("x-anthropic-billing-header: v=2;",) * 2,
        ("You help; cch=a5145;",) * 2,
    ],
)
def test_the_stamp_that_the_server_blanks_is_blanked(system: str, rendered: str) -> None:
    message = {"role": "user", "content": "hi"}
    chat = chat_of("messages", {"system": system, "messages": [message]})
    assert chat["messages"][0] == {"role": "system", "content": rendered}


def test_messages_tools_and_choices_are_named_as_in_chat() -> None:
    tool = {"name": "look", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}}
    document = {"messages": [], "tools": [tool], "chat_template_kwargs": {"a": 1}, "metadata": {}}
    chat = chat_of("messages", {**document, "tool_choice": {"type": "any"}})
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    assert chat == {
        "messages": [],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "chat_template_kwargs": {"a": 1},
    }
    for choice in ("none", None, ["any"], {"a": 1}):
        assert "tool_choice" not in chat_of("messages", {**document, "tool_choice": {"type": choice}})


@pytest.mark.parametrize("messages", [None, "hi", [1], [{"role": "user", "content": ["hi"]}]])
def test_messages_that_are_none_have_no_chat(messages: object) -> None:
    outcome = as_chat("messages", {"messages": messages})
    assert isinstance(outcome, NoBoundary)
    assert outcome.reason is Reason.UNREADABLE


@pytest.mark.parametrize("choice", [{"type": {}}, {"type": []}, {"type": None}, {}, "auto"])
def test_a_tool_choice_of_no_known_type_is_none(choice: object) -> None:
    assert "tool_choice" not in chat_of("messages", {"messages": [], "tool_choice": choice})


def test_a_call_whose_arguments_are_too_deep_to_be_written_has_no_chat() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    content = [{"type": "tool_use", "id": "i", "name": "n", "input": {"a": deep}}]
    outcome = as_chat("messages", {"messages": [{"role": "assistant", "content": content}]})
    assert isinstance(outcome, NoBoundary)
    assert outcome.reason is Reason.UNREADABLE
