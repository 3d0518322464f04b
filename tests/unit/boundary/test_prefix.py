from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvproxy.boundary.continuations import Document, Ending, NoBoundary, Reason
from kvproxy.boundary.prefix import LEAST_TOKENS, Boundary, boundary_of, common_prefix, find_boundary
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Obstacle, Unavailable

Render = Callable[[Document], str | Unavailable]

SYSTEM = {"role": "system", "content": "You help with whatever there may be to be helped with, in few words."}
QUESTION = {"role": "user", "content": "What is the colour of the sky over the sea at noon in June?"}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
BLUE = {"role": "user", "content": "Is it blue?"}


def called(thought: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": "{}"}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "reasoning_content": thought, "tool_calls": calls}


RESULT = {"role": "tool", "tool_call_id": "c", "content": "It is as blue as ever."}


def turn(message: dict[str, Any], *, has_thought: bool) -> str:
    thought = f"<think>{message['reasoning_content']}</think>" if has_thought else ""
    calls = "".join(
        f'<call>{{"name": "{call["function"]["name"]}", "arguments": {call["function"]["arguments"]}}}</call>'
        for call in message.get("tool_calls") or ()
    )
    return f"<{message['role']}>\n{thought}{message['content'] or ''}{calls}<end>\n"


def simple(document: Document) -> str:
    """Every message as it is."""
    body = "".join(
        turn(message, has_thought="reasoning_content" in message) for message in document["messages"]
    )
    return f"<tools>{document.get('tools')}<end>\n{body}<assistant>\n"


def forgetful(document: Document) -> str:
    """Drops the reasoning of everything before the last question, as the templates of reasoning models do."""
    messages = document["messages"]
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    body = "".join(
        turn(message, has_thought=index > last and "reasoning_content" in message)
        for index, message in enumerate(messages)
    )
    return f"{body}<assistant>\n"


def thinking(document: Document) -> str:
    """Begins the reply for the model, with what is not kept."""
    return f"{forgetful(document)}<think>"


def moving(document: Document) -> str:
    """Puts the tools before the last question, as Mistral's templates do."""
    *before, last = simple({"messages": document["messages"]}).rpartition("<user>")
    return f"{''.join(before[:-1])}<tools>{document.get('tools')}<end>\n<user>{last}"


WORDS = re.compile(r"<[^>]*>|\n+|[^\n<]")


@functools.cache
def number(word: str) -> int:
    return number.cache_info().currsize


def tokens_of(text: str) -> tuple[int, ...]:
    """A run of line ends is one token, as in most vocabularies."""
    return tuple(number(word) for word in WORDS.findall(text))


class Server:
    def __init__(self, render: Render) -> None:
        self.render = render
        self.fails_to_tokenize = False

    async def apply_template(self, document: Document, timeout: float) -> str | Unavailable:
        return self.render(document)

    async def tokenize(self, text: str, timeout: float, *, as_prompt: bool) -> tuple[int, ...] | Unavailable:
        assert as_prompt
        if self.fails_to_tokenize:
            return Unavailable(Obstacle.UNREACHABLE, "gone")
        return tokens_of(text)


async def found(
    render: Render, document: Document, ended: Ending = Ending.TEXT, **more: Any
) -> Boundary | NoBoundary:
    return await find_boundary(cast(LlamaServer, Server(render)), document, ended, **more)


def starts(render: Callable[[Document], str], boundary: Boundary | NoBoundary, *messages: object) -> bool:
    """Whether a request of these messages begins with the boundary, and goes on."""
    assert isinstance(boundary, Boundary)
    following = tokens_of(render({"messages": list(messages), "tools": TOOLS}))
    return len(following) > len(boundary.ids) and following[: len(boundary.ids)] == boundary.ids


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


ASKED = {"messages": [SYSTEM, QUESTION], "tools": TOOLS}
LOOPED = {"messages": [SYSTEM, QUESTION, called("Let me look."), RESULT], "tools": TOOLS}


@pytest.mark.parametrize("render", [simple, forgetful, thinking])
@pytest.mark.parametrize("reply", ["Blue.", "\n\nBlue.", " Blue", "<think>hm</think>Blue."])
async def test_the_next_request_begins_with_the_boundary_whatever_becomes_of_the_reply(
    render: Callable[[Document], str], reply: str
) -> None:
    boundary = await found(render, ASKED)
    assert starts(render, boundary, SYSTEM, QUESTION, said(reply), BLUE)


@pytest.mark.parametrize("render", [simple, forgetful, thinking])
async def test_hardly_more_than_the_beginning_of_the_reply_is_given_up(
    render: Callable[[Document], str],
) -> None:
    boundary = await found(render, ASKED)
    assert isinstance(boundary, Boundary)
    assert len(tokens_of(render(ASKED))) - len(boundary.ids) <= 3


@pytest.mark.parametrize("render", [simple, forgetful, thinking])
async def test_the_same_question_again_goes_on_from_the_boundary(render: Callable[[Document], str]) -> None:
    boundary = await found(render, ASKED)
    assert starts(render, boundary, SYSTEM, QUESTION)


async def test_a_running_tool_loop_is_kept_whole() -> None:
    boundary = await found(forgetful, LOOPED, Ending.TOOL_CALLS)
    assert starts(forgetful, boundary, *LOOPED["messages"], called("Once more."), RESULT)
    assert isinstance(boundary, Boundary)
    assert boundary.kept == len(boundary.ids) >= len(tokens_of(forgetful(LOOPED))) - 2


async def test_a_finished_tool_loop_is_kept_as_the_next_question_will_show_it() -> None:
    boundary = await found(forgetful, LOOPED, Ending.TEXT)
    assert starts(forgetful, boundary, *LOOPED["messages"], said("Blue."), BLUE)
    assert isinstance(boundary, Boundary)
    present = tokens_of(forgetful(LOOPED))
    assert boundary.ids[: boundary.kept] == present[: boundary.kept]
    assert boundary.ids[boundary.kept] != present[boundary.kept]
    assert boundary.cheap == Boundary(boundary.ids[: boundary.kept], boundary.kept)


async def test_a_cut_reply_keeps_what_a_retry_and_a_new_question_share() -> None:
    boundary = await found(forgetful, LOOPED, Ending.CUT)
    assert starts(forgetful, boundary, *LOOPED["messages"])
    assert starts(forgetful, boundary, *LOOPED["messages"], said("Bl"), BLUE)


async def test_tools_that_move_to_the_last_question_end_the_boundary_before_it() -> None:
    document = {"messages": [SYSTEM, QUESTION, said("Blue, I should say."), BLUE], "tools": TOOLS}
    boundary = await found(moving, document)
    assert starts(moving, boundary, *document["messages"], said("Yes."), QUESTION)
    assert isinstance(boundary, Boundary)
    assert boundary.kept < len(boundary.ids)


async def test_another_dialect_is_rendered_as_the_chat_it_becomes_once_its_length_proves_it() -> None:
    document = {"input": QUESTION["content"], "instructions": SYSTEM["content"]}
    rendered = tokens_of(simple({"messages": [SYSTEM, QUESTION]}))
    boundary = await found(simple, document, label="responses", prompt_tokens=len(rendered))
    assert boundary == Boundary(rendered[:-1], len(rendered) - 1)
    unproven = await found(simple, document, label="responses")
    assert isinstance(unproven, NoBoundary)
    assert unproven.reason is Reason.MISMATCH


@pytest.mark.parametrize("off_by", [-1, 1])
async def test_a_rendering_of_another_length_than_the_prompt_served_is_not_believed(off_by: int) -> None:
    length = len(tokens_of(simple(ASKED)))
    assert isinstance(await found(simple, ASKED, prompt_tokens=length), Boundary)
    outcome = await found(simple, ASKED, prompt_tokens=length + off_by)
    assert outcome == NoBoundary(Reason.MISMATCH, f"{length} tokens rendered, {length + off_by} served")


async def test_a_template_that_accepts_no_tool_call_is_told_in_its_words() -> None:
    def strict(document: Document) -> str | Unavailable:
        if any(message["role"] == "tool" for message in document["messages"]):
            return Unavailable(Obstacle.NOT_LLAMA_SERVER, "roles must alternate")
        return simple(document)

    assert await found(strict, ASKED, Ending.TOOL_CALLS) == NoBoundary(Reason.REFUSED, "roles must alternate")
    assert isinstance(await found(strict, ASKED, Ending.TEXT), Boundary)


async def test_a_server_that_does_not_answer_gives_no_boundary() -> None:
    gone = Unavailable(Obstacle.UNREACHABLE, "gone")
    assert await found(lambda _: gone, ASKED) == NoBoundary(Reason.UNANSWERED, "gone")
    server = Server(simple)
    server.fails_to_tokenize = True
    outcome = await find_boundary(cast(LlamaServer, server), ASKED, Ending.TEXT)
    assert outcome == NoBoundary(Reason.UNANSWERED, "gone")


@pytest.mark.parametrize(
    ("document", "label", "reason"),
    [
        ({"prompt": "x"}, "completion", Reason.DIALECT),
        ({"messages": []}, "chat/completions", Reason.UNREADABLE),
    ],
)
async def test_what_cannot_be_continued_has_no_boundary(
    document: Document, label: str, reason: Reason
) -> None:
    outcome = await found(simple, document, label=label)
    assert isinstance(outcome, NoBoundary)
    assert outcome.reason is reason


def test_a_boundary_that_runs_past_the_prompt_ends_one_token_before_the_prompts_end() -> None:
    present = tuple(range(30))
    assert boundary_of(present, [(*present, 1, 2), (*present, 1, 3)], Ending.TEXT) == Boundary(
        present[:-1], 29
    )


def test_too_little_is_no_boundary() -> None:
    present, least = tuple(range(30)), tuple(range(LEAST_TOKENS))
    assert boundary_of(present, [(*least, 77), (*least, 78)], Ending.TEXT) == Boundary(least, LEAST_TOKENS)
    outcome = boundary_of(present, [(*least[:-1], 77), (*least[:-1], 78)], Ending.TEXT)
    assert outcome == NoBoundary(Reason.TOO_SHORT, f"{LEAST_TOKENS - 1} tokens are shared")


@pytest.mark.parametrize(
    ("sequences", "shared"),
    [
        ([(1, 2, 3)], (1, 2, 3)),
        ([(1, 2, 3), (1, 2, 3)], (1, 2, 3)),
        ([(1, 2, 3), (1, 2)], (1, 2)),
        ([(1, 2, 3), (1, 9, 3), (1, 2, 9)], (1,)),
        ([(1,), (2,)], ()),
        ([(), (1,)], ()),
    ],
)
def test_the_common_prefix_ends_at_the_first_difference(
    sequences: list[tuple[int, ...]], shared: tuple[int, ...]
) -> None:
    assert common_prefix(sequences) == shared
