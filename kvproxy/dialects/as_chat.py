"""Requests of other dialects as the chat/completions request that llama-server makes of them.

The server renders `/v1/responses` and `/v1/messages` by turning them into chat/completions first, and shows
the rendering of that alone (`/apply-template`). This repeats the turn, as read in b11434 (`server-chat.cpp`),
for text. It is trusted only where the rendering comes out as long as the prompt that was served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from kvproxy.boundary.continuations import Document, NoBoundary, Reason

CHAT = "chat/completions"
"""The label of its endpoint."""

Message = dict[str, Any]
Item = Mapping[str, Any]


class _Unreadable(Exception):
    """Not of a shape that the server turns, or not one that we do."""


def as_chat(label: str, document: Document) -> Document | NoBoundary:
    """`label` is the endpoint's, as in `dialects.endpoints`."""
    turn = _TURNS.get(label)
    if turn is None:
        return NoBoundary(Reason.DIALECT, label)
    try:
        return turn(document)
    except _Unreadable as error:
        return NoBoundary(Reason.UNREADABLE, str(error))


def _objects(value: object, name: str) -> list[Item]:
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise _Unreadable(f"{name} is no list of objects")
    return value


def _text(value: object) -> str:
    """As the server reads a text field: anything else counts as none."""
    return value if isinstance(value, str) else ""


# /v1/responses


def _from_responses(document: Document) -> Document:
    given, instructions = document.get("input"), document.get("instructions")
    messages: list[Message] = []
    if "instructions" in document:
        messages.append({"role": "system", "content": _text(instructions)})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in _objects(given, "input"):
            _add_item(messages, item)
    turned = {"input", "instructions", "tools", "reasoning", "max_output_tokens"}
    chat = {key: value for key, value in document.items() if key not in turned} | {"messages": messages}
    tools = [
        _function(tool, "parameters")
        for tool in _objects(document.get("tools", []), "tools")
        if tool.get("type") == "function"
    ]
    effort = document.get("reasoning")
    return (
        chat
        | ({"tools": tools} if tools else {})
        | (
            {"reasoning_effort": effort["effort"]}
            if isinstance(effort, Mapping) and "effort" in effort
            else {}
        )
    )


def _add_item(messages: list[Message], item: Item) -> None:
    kind, role = item.get("type"), item.get("role")
    if kind == "function_call":
        _last_assistant(messages).setdefault("tool_calls", []).append(
            _call(item.get("call_id"), item.get("name"), item.get("arguments"))
        )
    elif kind == "function_call_output":
        content = item.get("output")
        parts = content if isinstance(content, str) else _parts(content)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": parts})
    elif kind == "reasoning":
        reasoned = _objects(item.get("content"), "reasoning")
        _last_assistant(messages, {"content": []})["reasoning_content"] = "".join(
            _text(part.get("text")) for part in reasoned[:1]
        )
    elif role in ("user", "system", "developer"):
        messages.append({"role": role, "content": _parts(item.get("content"))})
    elif role == "assistant" and kind == "message":
        _last_assistant(messages).setdefault("content", []).extend(_parts(item.get("content")))
    else:
        raise _Unreadable(f"an item of type {kind!r} and role {role!r}")


def _last_assistant(messages: list[Message], fresh: Item | None = None) -> Message:
    """The last message if it is the assistant's: its items become one message. Else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", **(fresh or {})})
    return messages[-1]


def _parts(content: object) -> list[Message]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    # Anything but text keeps its type, and so is seen to be no text.
    return [
        {"type": "text", "text": _text(part.get("text"))}
        if part.get("type") in ("input_text", "output_text")
        else dict(part)
        for part in _objects(content, "content")
    ]


def _call(call_id: object, name: object, arguments: object) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _function(tool: Item, schema: str) -> Message:
    return {
        "type": "function",
        "function": {
            "name": tool.get("name", ""),
            "description": tool.get("description", ""),
            "parameters": tool.get(schema, {}),
        },
    }


# /v1/messages


_PASSED = ("temperature", "top_p", "top_k", "chat_template_kwargs")
_CHOICES = {"auto": "auto", "any": "required", "tool": "required"}


def _from_messages(document: Document) -> Document:
    messages: list[Message] = []
    if document.get("system") is not None:
        messages.append({"role": "system", "content": _system(document["system"])})
    for message in _objects(document.get("messages"), "messages"):
        messages.extend(_turned(message))
    chat: Message = {key: document[key] for key in _PASSED if key in document} | {"messages": messages}
    if "tools" in document:
        tools = _objects(document["tools"], "tools")
        chat["tools"] = [_function(tool, "input_schema") for tool in tools]
    choice = document.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if isinstance(kind, str) and kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    return chat


def _system(system: object) -> str:
    if isinstance(system, str):
        return _without_stamp(system)
    texts = [block for block in _objects(system, "system") if block.get("type") == "text"]
    return "".join(_without_stamp(_text(block.get("text"))) for block in texts)


# A client's stamp that changes with each request; the server blanks it before it renders.


def _without_stamp(text: str) -> str:
    head, found, rest = text.partition("cch=")
    if not text.startswith("x-anthropic-billing-header:") or not found or rest[5:6] != ";":
        return text
    return f"{head}cch=fffff{rest[5:]}"


def _turned(message: Item) -> Iterable[Message]:
    content = message.get("content")
    if not isinstance(content, list):
        is_empty = "content" not in message and message.get("role") == "assistant"
        return [] if is_empty else [dict(message)]
    blocks = _objects(content, "content")
    turned = _spoken(_text(message.get("role")), blocks)
    results = [_result(block) for block in blocks if block.get("type") == "tool_result"]
    return [*turned, *results]


def _spoken(role: str, blocks: Iterable[Item]) -> list[Message]:
    said: list[Item] = []
    calls: list[Message] = []
    thought = ""
    for block in blocks:
        kind = block.get("type")
        if kind in ("text", "image"):
            said.append(block)
        elif kind == "thinking":
            thought += _text(block.get("thinking"))
        elif kind == "tool_use":
            arguments = orjson.dumps(block.get("input", {})).decode()
            calls.append(_call(_text(block.get("id")), _text(block.get("name")), arguments))
    if not (said or calls or thought):
        return []
    turned: Message = {"role": role, "content": said or ""}
    return [
        turned
        | ({"tool_calls": calls} if calls else {})
        | ({"reasoning_content": thought} if thought else {})
    ]


def _result(block: Item) -> Message:
    content = block.get("content")
    if isinstance(content, list):
        parts = _objects(content, "content")
        has_media = any(part.get("type") == "image" for part in parts)
        content = (
            parts
            if has_media
            else "".join(_text(part.get("text")) for part in parts if part.get("type") == "text")
        )
    return {
        "role": "tool",
        "tool_call_id": _text(block.get("tool_use_id")),
        "content": content if isinstance(content, str | list) else "",
    }


_TURNS: Mapping[str, Callable[[Document], Document]] = {
    CHAT: lambda document: document,
    "responses": _from_responses,
    "messages": _from_messages,
}
