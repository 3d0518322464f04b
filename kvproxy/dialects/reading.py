"""One request as its endpoint means it: what becomes the prompt, in order, and what it asks of the answer.

A conversation is told by *entries*, one digest each: first the head (options of the template, tools, system
prompt), which a template renders before everything else, then the messages. A raw prompt has no turns; its
entries are blocks of one size, so that a longer prompt begins with the entries of a shorter one.

The texts are at hand for as long as the request lives. They are stored and logged nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from hashlib import sha256
from typing import Any

import orjson

from kvproxy.dialects.canonical import (
    message_bytes,
    options_bytes,
    role_of,
    system_bytes,
    text_of,
    tools_bytes,
)
from kvproxy.dialects.shapes import NO_SHAPE, SHAPES, Shape
from kvproxy.frozen import frozen

BLOCK_BYTES = 1024
"""Of a raw prompt; one that is shorter is computed faster than it is worth recognising."""
DIGEST_BYTES = 16
MOST_ENTRIES = 8192
"""Of a longer body the rest is not told apart: no conversation has so many turns, but a body may."""

SYSTEM_ROLES = frozenset({"system", "developer"})
OPTIONS, TOOLS, SYSTEM, PROMPT = "options", "tools", "system", "prompt"
"""What stands for a role where no message does."""

Document = Mapping[str, Any]


@frozen
class Reading:
    """`label` is the endpoint's, `max_tokens` the client's bound on the answer, None if it set none.

    `roles`, `digests` and `sizes` (in bytes, about) go together, one of each per entry; the first `head` of
    them are the head.
    """

    label: str
    model: str
    is_stream: bool
    has_tools: bool
    max_tokens: int | None
    roles: tuple[str, ...] = ()
    digests: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()
    head: int = 0
    prompt: bytes | None = field(default=None, repr=False)
    """A raw prompt."""
    document: Document = field(default_factory=dict, repr=False)
    """The body, parsed."""
    messages: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    """As the client sent them; a lone text is what the user says."""

    @property
    def is_recognisable(self) -> bool:
        """Whether it says enough to tell its conversation from others."""
        return len(self.digests) > self.head

    @property
    def system_text(self) -> str:
        """All system prompts at the beginning."""
        shape = SHAPES.get(self.label, NO_SHAPE)
        own = text_of(self.document.get(shape.system)) if shape.system else ""
        leading = []
        for message in self.messages:
            role = message.get("role")
            if not isinstance(role, str) or role not in SYSTEM_ROLES:
                break
            leading.append(text_of(message.get("content")))
        return "\n".join(text for text in (own, *leading) if text)

    @property
    def user_texts(self) -> tuple[str, ...]:
        """What the user says, message by message; results of tools are no words of the user."""
        texts = (text_of(m.get("content")) for m in self.messages if m.get("role") == "user")
        return tuple(text for text in texts if text)

    @property
    def first_user_text(self) -> str:
        return next(iter(self.user_texts), "")


def read(label: str, document: Document) -> Reading:
    """`document` is the body. Never raises: what is not of the endpoint's shape has no entries."""
    shape = SHAPES.get(label, NO_SHAPE)
    tools = document.get(shape.tools) if shape.tools else None
    model = document.get("model")
    reading = _Entries()
    prompt: bytes | None = None
    messages = _messages(document, shape)
    if shape.messages:
        reading.add_head(document, shape, tools)
        reading.add_messages(messages)
    elif shape.prompt:
        prompt = _raw_prompt(document.get(shape.prompt))
        reading.add_blocks(prompt or b"")
    return Reading(
        label,
        model if isinstance(model, str) else "",
        document.get("stream") is True,
        bool(tools),
        _limit(document, shape),
        tuple(reading.roles),
        tuple(reading.digests),
        tuple(reading.sizes),
        reading.head,
        prompt,
        document,
        messages,
    )


class _Entries:
    def __init__(self) -> None:
        self.roles: list[str] = []
        self.digests: list[bytes] = []
        self.sizes: list[int] = []
        self.head = 0

    def add(self, role: str, data: bytes) -> None:
        self.roles.append(role)
        self.sizes.append(len(data))
        # Faster than its rivals where the processor helps, which by now is nearly everywhere. Unkeyed, since
        # it never leaves the process: what is kept is chained under the installation's secret.
        self.digests.append(
            sha256(b"%b\0%b" % (role.encode("utf-8", "surrogatepass"), data)).digest()[:DIGEST_BYTES]
        )

    def add_head(self, document: Document, shape: Shape, tools: object) -> None:
        options = {name: document[name] for name in shape.options if document.get(name)}
        if options:
            self.add(OPTIONS, options_bytes(options))
        if isinstance(tools, list) and tools:
            self.add(TOOLS, tools_bytes(tools))
        if shape.system and (data := system_bytes(document.get(shape.system))):
            self.add(SYSTEM, data)
        self.head = len(self.digests)

    def add_messages(self, messages: tuple[Mapping[str, Any], ...]) -> None:
        is_head = True
        for message in messages[:MOST_ENTRIES]:
            role = role_of(message)
            if role is None:
                continue
            is_head = is_head and role in SYSTEM_ROLES
            if not is_head:
                self.add(role, message_bytes(message))
            elif data := system_bytes(message.get("content")):
                self.add(role, data)
                self.head += 1

    def add_blocks(self, prompt: bytes) -> None:
        end = min(len(prompt), MOST_ENTRIES * BLOCK_BYTES)
        for start in range(0, end - BLOCK_BYTES + 1, BLOCK_BYTES):
            self.add(PROMPT, prompt[start : start + BLOCK_BYTES])


def _messages(document: Document, shape: Shape) -> tuple[Mapping[str, Any], ...]:
    if not shape.messages:
        return ()
    given = document.get(shape.messages)
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if not isinstance(given, list):
        return ()
    return tuple([message for message in given if isinstance(message, dict)])


def _raw_prompt(prompt: object) -> bytes | None:
    """One prompt as bytes of which a continuation's begin alike: its text, or its token ids in a row."""
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, list) and len(prompt) == 1:
        return _raw_prompt(prompt[0])
    if isinstance(prompt, list) and any(isinstance(entry, int) for entry in prompt):
        return orjson.dumps(prompt, default=repr)[:-1] + b","
    return None


def _limit(document: Document, shape: Shape) -> int | None:
    for name in shape.limits:
        if name not in document:
            continue
        value = document[name]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
