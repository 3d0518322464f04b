from __future__ import annotations

from typing import Any

import pytest
from multidict import CIMultiDict

from kvproxy.auxiliary.fingerprints import Fingerprint, Library
from kvproxy.auxiliary.library import packaged
from kvproxy.auxiliary.sorting import Sorting
from kvproxy.auxiliary.structure import UNKNOWN, Habit
from kvproxy.dialects.reading import Reading, read

WORDING = Fingerprint(client="some client", where="system", starts="You write titles")
SORTING = Sorting(True, ("x-task",), Library([WORDING]))
TITLE = {"messages": [{"role": "system", "content": "You write titles"}, {"role": "user", "content": "hi"}]}
TURN = {"messages": [{"role": "user", "content": "hi"}]}


def why(
    document: dict[str, Any],
    *,
    sorting: Sorting = SORTING,
    headers: dict[str, str] | None = None,
    habit: Habit = UNKNOWN,
    continues: bool = False,
    label: str = "chat/completions",
) -> str | None:
    reading = read(label, document)
    return sorting.why_auxiliary(CIMultiDict(headers or {}), reading, habit, continues=continues)


def test_wording_shape_and_headers_mark_a_side_call() -> None:
    assert why(TITLE) == "some client"
    assert why(TURN, habit=Habit(has_tools=True)) == "no tools"
    assert why(TURN, headers={"X-Task": "tags"}) == "x-task"
    assert why(TURN) is None


def test_what_carries_a_conversation_on_is_a_turn_of_it() -> None:
    for suspect in (
        {"document": TITLE},
        {"document": TURN, "habit": Habit(has_tools=True)},
        {"document": TURN, "headers": {"x-claude-code-request-class": "auxiliary"}},
    ):
        assert why(**suspect, continues=True) is None  # type: ignore[arg-type]


def test_our_own_header_is_believed_whatever_the_content_says() -> None:
    assert why(TURN, headers={"X-KVProxy-Purpose": "auxiliary"}, continues=True) == "x-kvproxy-purpose"
    assert why(TITLE, headers={"X-KVProxy-Purpose": "main"}) is None


def test_what_a_client_calls_a_turn_is_not_suspected() -> None:
    assert why(TITLE, headers={"x-claude-code-request-class": "subagent"}) is None


def test_what_carries_a_conversation_on_is_looked_at_no_further() -> None:
    class Untouched(Library):
        def find(self, reading: Reading) -> Fingerprint | None:
            raise AssertionError("was looked for")

    assert why(TITLE, sorting=Sorting(True, (), Untouched([WORDING])), continues=True) is None


def test_switched_off_only_our_own_header_counts() -> None:
    off = Sorting(False, ("x-task",), Library([WORDING]))
    assert why(TITLE, sorting=off, headers={"X-Task": "title"}) is None
    assert why(TURN, sorting=off, headers={"X-KVProxy-Purpose": "auxiliary"}) == "x-kvproxy-purpose"


def test_a_body_that_cannot_be_understood_is_told_by_headers_alone() -> None:
    headers = CIMultiDict({"X-Task": "title"})
    assert SORTING.why_auxiliary(headers, None, UNKNOWN, continues=False) == "x-task"
    assert SORTING.why_auxiliary(CIMultiDict(), None, UNKNOWN, continues=False) is None


def test_what_has_no_turns_is_nothing_to_sort() -> None:
    assert why({"input": "You write titles"}, label="embeddings", headers={"X-Task": "title"}) is None


# As the clients word them

SORTED = Sorting(True, (), Library(packaged()))


def ask(**document: Any) -> Reading:
    return read("chat/completions", document)


def user(text: str, **more: Any) -> Reading:
    return ask(messages=[{"role": "user", "content": text}], **more)


def system(text: str) -> Reading:
    return ask(messages=[{"role": "system", "content": text}, {"role": "user", "content": "hello there"}])


HISTORY = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]

WORDED = {
    "Open WebUI title": user(
        "### Task:\nGenerate a concise, 3-5 word title with an emoji\n### Output:\n{}\n<chat_history>\n"
    ),
    "Open WebUI autocomplete": user("### Task:\nYou are an autocompletion system. Continue"),
    "OpenCode title": system("You are a title generator. You output ONLY a thread title. Nothing else."),
    "Crush title": system("You will generate a short title based on the first message"),
    "Claude Code title": read(
        "messages",
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1;"},
                {"type": "text", "text": "Generate a concise, sentence-case title (3-7 words)"},
            ],
            "messages": [{"role": "user", "content": "fix the bug"}],
        },
    ),
    "Claude Code probe": user("Warmup", max_tokens=1),
    "Claude Code suggestion": ask(messages=[*HISTORY, {"role": "user", "content": "[SUGGESTION MODE: x]"}]),
    "Zed title": ask(
        messages=[
            *HISTORY,
            {"role": "user", "content": "Generate a concise 3-7 word title for this conversation"},
        ]
    ),
    "Copilot title": system("You are an expert in crafting pithy titles for chatbot conversations."),
    "Continue title": user("Given the following... please reply with a title for the chat that is 3-4 words"),
    "Aider summary": system("*Briefly* summarize this partial conversation about programming."),
    "LobeChat title": system("You are a professional conversation summarizer. Generate a concise title"),
    "Roo condense": ask(
        messages=[
            *HISTORY,
            {
                "role": "user",
                "content": "CRITICAL: This summarization request is a SYSTEM OPERATION, not a message",
            },
        ]
    ),
}


@pytest.mark.parametrize("reading", WORDED.values(), ids=WORDED)
def test_the_side_calls_of_known_clients_are_told_from_turns(reading: Reading) -> None:
    assert SORTED.why_auxiliary(CIMultiDict(), reading, UNKNOWN, continues=False) is not None


TURNS = {
    "a first question": user("Write me a poem about the sea"),
    "a question about titles": user("Generate a title for my novel, please"),
    "an agent": ask(
        messages=[{"role": "system", "content": "You are opencode"}, {"role": "user", "content": "hi"}],
        tools=[{"type": "function"}],
    ),
    "a continuation": ask(messages=[*HISTORY, {"role": "user", "content": "and then?"}]),
    "a raw prompt": read("completion", {"prompt": "Once upon a time", "n_predict": 64}),
}


@pytest.mark.parametrize("reading", TURNS.values(), ids=TURNS)
def test_a_turn_is_no_side_call(reading: Reading) -> None:
    assert SORTED.why_auxiliary(CIMultiDict(), reading, UNKNOWN, continues=False) is None


def test_our_own_wordings_come_with_the_package() -> None:
    assert len(Library(packaged())) >= 20
