"""What of a message is prompt, as bytes that stay the same from request to request: pure.

Clients send the same turn again in another dress. What changes without changing the conversation is left out:
 - marks for a cache (`cache_control`), which move to the newest message with each request;
 - ids and states of items, which come and go;
 - reasoning, which many clients drop from a turn once the next one begins;
 - whether a text stands alone or as the only part of a list;
 - the stamp that Claude Code puts first into its system prompt.
Only whether two turns are the same is told by these bytes, never what the server computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

STAMP = "x-anthropic-billing-header:"
"""How a client's stamp begins; it is a block or a line of its own, and differs between requests."""

_DRESS = frozenset(
    {
        "annotations",
        "cache_control",
        "citations",
        "encrypted_content",
        "id",
        "index",
        "logprobs",
        "phase",
        "reasoning",
        "reasoning_content",
        "reasoning_details",
        "status",
    }
)
_REASONING = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text"})
_TEXTS = frozenset({"text", "input_text", "output_text"})
_ROLES: Mapping[str, str] = {
    "function_call": "assistant",
    "custom_tool_call": "assistant",
    "local_shell_call": "assistant",
    "function_call_output": "tool",
    "custom_tool_call_output": "tool",
}
"""Of the items of a response that name none."""

_SORTED = orjson.OPT_SORT_KEYS


def role_of(message: Mapping[str, Any]) -> str | None:
    """Who says it; None for what is no part of the conversation."""
    kind, role = message.get("type"), message.get("role")
    if kind.__class__ is str and kind in _REASONING:
        return None
    if isinstance(role, str):
        return role
    return _ROLES.get(kind, "item") if isinstance(kind, str) else "item"


def message_bytes(message: Mapping[str, Any]) -> bytes:
    """The message without its role."""
    content = message.get("content")
    if content.__class__ is not str:
        content = _content(content)
    elif len(message) == _PLAIN_FIELDS and "role" in message:
        return content.encode("utf-8", "surrogatepass")  # nearly all there are, and much the faster
    rest = {key: value for key, value in message.items() if key not in _APART and value}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        rest["tool_calls"] = [_bare(call) for call in calls]
    if isinstance(content, str) and not rest:
        return content.encode("utf-8", "surrogatepass")
    return _dumps([content, rest])


_PLAIN_FIELDS = 2
"""Of a message that is its role and its text."""
_APART = _DRESS | {"role", "type", "content", "tool_calls"}


def system_bytes(system: object) -> bytes:
    """A system prompt, without the stamp; empty if nothing is left of it."""
    parts = system if isinstance(system, list) else [system]
    left = [_without_stamp(part) for part in parts]
    content = _content([part for part in left if part])
    return _dumps(content) if content else b""


def tools_bytes(tools: list[Any]) -> bytes:
    """In their order, which is the prompt's."""
    return _dumps([_bare(tool) for tool in tools])


def options_bytes(options: Mapping[str, Any]) -> bytes:
    return _dumps(options)


def text_of(content: object) -> str:
    """The words of a message, without pictures, calls and results."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(_texts(content))


def _texts(parts: Iterable[Any]) -> Iterable[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping) and _kind(part) in _TEXTS:
            text = part.get("text")
            if isinstance(text, str):
                yield text


def _content(content: object) -> object:
    """One text as itself, several parts as a list of them."""
    if not isinstance(content, list):
        return content or ""
    if len(content) == 1:
        return _part(content[0]) or ""
    parts = [part for part in map(_part, content) if part]
    return (parts[0] if len(parts) == 1 else parts) if parts else ""


def _part(part: object) -> object:
    if not isinstance(part, dict):
        return part
    kind = _kind(part)
    if kind in _TEXTS:
        return part.get("text")
    if kind in _REASONING:
        return None
    bare = _bare(part)
    if isinstance(bare.get("content"), list):  # what a tool gave back
        bare["content"] = _content(bare["content"])
    return bare


def _kind(part: Mapping[str, Any]) -> str:
    """Empty where it is no word: a client may write anything there."""
    kind = part.get("type")
    return kind if isinstance(kind, str) else ""


def _bare(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: inner for key, inner in value.items() if key not in _DRESS}


def _without_stamp(part: Any) -> Any:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str) or not text.startswith(STAMP):
        return part
    return text.partition("\n")[2]


def _dumps(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=_SORTED)
    except (TypeError, orjson.JSONEncodeError):
        # Half a surrogate pair, or a number of more than 64 bits: no JSON for this library, text for us.
        return repr(value).encode("utf-8", "surrogatepass")
