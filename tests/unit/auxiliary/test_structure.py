from __future__ import annotations

from typing import Any

import pytest

from kvproxy.auxiliary.structure import UNKNOWN, Habit, shape_of
from kvproxy.dialects.reading import Reading, read

TOOLS = [{"type": "function", "function": {"name": "ls"}}]
AGENT = Habit(has_tools=True)


def chat(*roles: str, **more: Any) -> Reading:
    said = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]
    return read("chat/completions", {"messages": said, **more})


def test_a_few_messages_without_tools_are_no_turn_of_an_agent() -> None:
    assert shape_of(chat("system", "user", "user"), AGENT) == "no tools"
    assert shape_of(chat("system", "user", tools=TOOLS), AGENT) is None
    assert shape_of(chat("system", "user", "assistant", "user"), AGENT) is None
    assert shape_of(chat("system", "user"), UNKNOWN) is None


SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}


@pytest.mark.parametrize(
    ("label", "document"),
    [
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ],
)
def test_an_answer_of_one_telling_field_is_no_turn(label: str, document: dict[str, Any]) -> None:
    said = {"messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    assert shape_of(read(label, {**said, **document}), UNKNOWN) == "title schema"


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_object"},
        {"json_schema": {"schema": {"properties": {"title": {}, "body": {}}}}},
        {"json_schema": {"schema": {"properties": {"answer": {}}}}},
        {"json_schema": {"schema": 7}},
        "title",
    ],
)
def test_any_other_form_of_answer_may_be_a_turn(wanted: Any) -> None:
    assert shape_of(chat("user", response_format=wanted), UNKNOWN) is None


def test_a_word_that_asks_for_one_token_is_a_probe() -> None:
    assert shape_of(chat("user", max_tokens=1), UNKNOWN) == "probe"
    assert shape_of(chat("user", n_predict=0), UNKNOWN) == "probe"
    assert shape_of(chat("user", max_tokens=2), UNKNOWN) is None
    assert shape_of(chat("system", "user", max_tokens=1), UNKNOWN) is None
    assert shape_of(chat("user", "assistant", max_tokens=1), UNKNOWN) is None
    long = read("chat/completions", {"messages": [{"role": "user", "content": "x" * 65}], "max_tokens": 1})
    assert shape_of(long, UNKNOWN) is None


def test_pre_encoding_a_raw_prompt_is_no_probe() -> None:
    assert shape_of(read("completion", {"prompt": "hi", "n_predict": 0}), UNKNOWN) is None


def test_an_editors_completion_is_never_a_turn() -> None:
    assert shape_of(read("infill", {"input_prefix": "a", "input_suffix": "b"}), UNKNOWN) == "infill"
