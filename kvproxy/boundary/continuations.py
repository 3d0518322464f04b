"""What may follow a turn, as request documents that differ from the first word of the reply on.

A chat template need not append: it drops the reasoning of a finished tool loop, moves the tools to the last
question, trims. So what the next prompt shares with this one is not known from the messages. It is found by
having the server render possible next requests and looking at what they have in common.

How the turn ended decides what may follow. Templates treat the messages since the last question of the user
apart: asked for what follows a tool call with another question, they would throw the running loop away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Document = Mapping[str, Any]
"""A request of the chat/completions dialect."""


class Ending(StrEnum):
    """How a turn ended."""

    TEXT = "text"
    """The next request brings the reply and another question."""
    TOOL_CALLS = "tool_calls"
    """The next request brings the calls and their results."""
    CUT = "cut"
    """The reply is not whole: the next request brings its beginning, or asks the same again."""


def ending_of(finish_reason: str | None) -> Ending:
    """`finish_reason` in the words of chat/completions; None if the answer did not get that far."""
    return {"stop": Ending.TEXT, "tool_calls": Ending.TOOL_CALLS}.get(finish_reason or "", Ending.CUT)


class Reason(StrEnum):
    """Why there is no boundary."""

    DIALECT = "dialect"
    """Of this kind of request the server does not show how it renders it."""
    UNREADABLE = "unreadable"
    """The document is not what this dialect asks for."""
    MEDIA = "media"
    """Pictures or sound: they have no token ids."""
    REFUSED = "refused"
    """The template does not accept what might follow."""
    UNANSWERED = "unanswered"
    """The server did not render or tokenise."""
    MISMATCH = "mismatch"
    """The prompt that was served has another length than its rendering: not the same prompt."""
    TOO_SHORT = "too_short"
    """Hardly anything is shared."""


@dataclass(frozen=True, slots=True)
class NoBoundary:
    reason: Reason
    detail: str = ""


def continuations(document: Document, ended: Ending) -> tuple[Document, ...] | NoBoundary:
    """Possible next requests. Every field that may reach the template is carried over."""
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return NoBoundary(Reason.UNREADABLE, "no list of messages")
    if any(_has_media(message) for message in messages):
        return NoBoundary(Reason.MEDIA)
    asked = _without_prefill(messages)
    if not asked:
        return NoBoundary(Reason.UNREADABLE, "no question")
    # To continue a final message that is no longer the last would be refused.
    carried = {key: value for key, value in document.items() if key != "continue_final_message"}
    return tuple({**carried, "messages": [*asked, *more]} for more in _FOLLOWING[ended])


def _has_media(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        not isinstance(part, Mapping) or part.get("type") != "text" for part in content
    )


def _without_prefill(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Without the beginning of a reply that the server was asked to continue: a client may send the whole
    reply back as one message."""
    end = len(messages)
    while end and messages[end - 1].get("role") == "assistant":
        end -= 1
    return messages[:end]


def _user(content: str) -> Document:
    return {"role": "user", "content": content}


def _assistant(content: str | None, **more: object) -> Document:
    return {"role": "assistant", "content": content, **more}


def _calling(call_id: str, name: str, arguments: str) -> list[Document]:
    return [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}]


def _result(call_id: str, content: str) -> Document:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


# Nothing in one may begin like its counterpart in another, or a part of the guess would pass for shared.
# White space in front joins some tokenisers' last token of the prompt; a reasoning is kept by some templates;
# text may stand before a call. Mistral's templates want call ids of nine letters or digits.
_ID, _OTHER_ID, _THIRD_ID = "kQ7wZ2mXa", "pR4tY9vLb", "zB5nH1cDe"

_TEXT = (
    (_assistant("Xyz"), _user("Q")),
    (_assistant("\n other"), _user("W")),
    (_assistant("So", reasoning_content="Hm."), _user("Eh")),
)

_TOOL_CALLS = (
    (_assistant(None, tool_calls=_calling(_ID, "look", '{"at":"sky"}')), _result(_ID, "blue")),
    (_assistant("Xyz", tool_calls=_calling(_OTHER_ID, "find", '{"key":1}')), _result(_OTHER_ID, "gone")),
    (
        _assistant("\n so", reasoning_content="Hm.", tool_calls=_calling(_THIRD_ID, "write", '{"path":[]}')),
        _result(_THIRD_ID, "[]"),
    ),
)

_FOLLOWING: Mapping[Ending, Sequence[Sequence[Document]]] = {
    Ending.TEXT: _TEXT,
    Ending.TOOL_CALLS: _TOOL_CALLS,
    Ending.CUT: _TEXT,
}
