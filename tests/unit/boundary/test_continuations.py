from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.boundary.continuations import (
    Document,
    Ending,
    NoBoundary,
    Reason,
    continuations,
    ending_of,
)

QUESTION = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def following(document: Document, ended: Ending) -> list[list[dict[str, Any]]]:
    """The messages that each continuation adds to the one question."""
    documents = continuations(document, ended)
    assert not isinstance(documents, NoBoundary)
    return [list(each["messages"][1:]) for each in documents]


@pytest.mark.parametrize(
    ("finish_reason", "ending"),
    [
        ("stop", Ending.TEXT),
        ("tool_calls", Ending.TOOL_CALLS),
        ("length", Ending.CUT),
        ("content_filter", Ending.CUT),
        (None, Ending.CUT),
    ],
)
def test_a_finish_reason_tells_how_the_turn_ended(finish_reason: str | None, ending: Ending) -> None:
    assert ending_of(finish_reason) is ending


def test_a_text_is_followed_by_a_reply_and_a_question() -> None:
    for added in following({"messages": [QUESTION]}, Ending.TEXT):
        assert [message["role"] for message in added] == ["assistant", "user"]


def test_a_tool_call_is_followed_by_the_call_and_its_result() -> None:
    for added in following({"messages": [QUESTION], "tools": TOOLS}, Ending.TOOL_CALLS):
        assert [message["role"] for message in added] == ["assistant", "tool"]
        call = added[0]["tool_calls"][0]
        assert call["id"] == added[1]["tool_call_id"]
        assert call["id"].isalnum()
        assert len(call["id"]) == 9
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("ended", Ending)
def test_some_replies_begin_with_white_space_and_some_with_a_reasoning(ended: Ending) -> None:
    replies = [added[0] for added in following({"messages": [QUESTION]}, ended)]
    assert any(str(reply["content"])[0].isspace() for reply in replies)
    assert any("reasoning_content" in reply for reply in replies)
    assert any("reasoning_content" not in reply for reply in replies)


def test_no_two_calls_begin_alike() -> None:
    calls = [added[0]["tool_calls"][0] for added in following({"messages": [QUESTION]}, Ending.TOOL_CALLS)]
    results = [added[1]["content"] for added in following({"messages": [QUESTION]}, Ending.TOOL_CALLS)]
    for beginnings in (
        [call["id"][0] for call in calls],
        [call["function"]["name"][0] for call in calls],
        [call["function"]["arguments"][2] for call in calls],
        [result[0] for result in results],
    ):
        assert len(set(beginnings)) == len(calls)


def test_every_field_that_may_reach_the_template_is_carried_over() -> None:
    fields = {
        "model": "m",
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "add_generation_prompt": False,
        "response_format": {"type": "json_object"},
    }
    documents = continuations({"messages": [QUESTION], **fields}, Ending.TEXT)
    assert not isinstance(documents, NoBoundary)
    for document in documents:
        assert {key: value for key, value in document.items() if key != "messages"} == fields


def test_the_beginning_of_a_reply_to_be_continued_is_not_taken_for_history() -> None:
    begun = {"role": "assistant", "content": "Well"}
    document = {"messages": [QUESTION, begun], "continue_final_message": True}
    documents = continuations(document, Ending.TEXT)
    assert not isinstance(documents, NoBoundary)
    for each in documents:
        assert begun not in each["messages"]
        assert each["messages"][0] == QUESTION
        assert "continue_final_message" not in each


@pytest.mark.parametrize("messages", [None, "hi", ["hi"], [], [{"role": "assistant", "content": "x"}]])
def test_what_asks_nothing_has_no_continuation(messages: object) -> None:
    outcome = continuations({"messages": messages}, Ending.TEXT)
    assert isinstance(outcome, NoBoundary)
    assert outcome.reason is Reason.UNREADABLE


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "u"}}, "text"])
def test_parts_that_are_no_text_have_no_tokens_to_be_known(part: object) -> None:
    content = [{"type": "text", "text": "look"}, part]
    outcome = continuations({"messages": [{"role": "user", "content": content}]}, Ending.TEXT)
    assert outcome == NoBoundary(Reason.MEDIA)


def test_parts_of_text_are_as_good_as_text() -> None:
    question = {"role": "user", "content": [{"type": "text", "text": "look"}]}
    assert not isinstance(continuations({"messages": [question]}, Ending.TEXT), NoBoundary)
