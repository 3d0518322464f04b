"""Requests as chat clients make them, and the lines they have."""

from __future__ import annotations

from typing import Any

from kvproxy.dialects.reading import Reading, read
from kvproxy.sessions.lines import Asked, Line

SECRET = b"s" * 32
Turn = dict[str, Any]


def turns(text: str) -> list[Turn]:
    """`S:` system, `U:` user, `A:` assistant, `T:` tool; one message a word, as in "S:helper U:one A:yes"."""
    roles = {"S": "system", "U": "user", "A": "assistant", "T": "tool"}
    said = [word.split(":", 1) for word in text.split()]
    return [{"role": roles[role], "content": content} for role, content in said]


def chat(text: str, **more: Any) -> Reading:
    return read("chat/completions", {"messages": turns(text), **more})


def raw(prompt: str) -> Reading:
    return read("completion", {"prompt": prompt})


def asked(reading: Reading | str, secret: bytes = SECRET) -> Asked:
    return Asked(secret, chat(reading) if isinstance(reading, str) else reading)


def line(reading: Reading | str) -> Line:
    return asked(reading).line
