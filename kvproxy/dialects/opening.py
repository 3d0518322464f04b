"""How a conversation opens: pure. Two that open alike share the KV of their opening.

Only a hint, and only ever used to leave in a slot what the next conversation can use: the server compares
tokens, so a wrong guess costs nothing but an erase that was not made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

WORTH_CHARS = 1024
"""Shorter openings are computed faster than they are worth thinking about."""

LOOKED_AT_CHARS = 8192

_SYSTEM = ("system", "developer")


def opening_of(document: Mapping[str, Any] | None) -> bytes | None:
    """A digest of the system prompt, or of how a raw prompt begins; None if that is short or absent."""
    text = _text(document) if document is not None else None
    if text is None or len(text) < WORTH_CHARS:
        return None
    return hashlib.sha256(text[:LOOKED_AT_CHARS].encode("utf-8", "surrogatepass")).digest()[:16]


def _text(document: Mapping[str, Any]) -> str | None:
    messages = document.get("messages")
    if isinstance(messages, list) and messages:
        first = messages[0]
        is_system = isinstance(first, Mapping) and first.get("role") in _SYSTEM
        return _content(first.get("content")) if is_system else None
    return next((v for f in ("instructions", "prompt") if isinstance(v := document.get(f), str)), None)


def _content(content: object) -> str | None:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and isinstance(content[0], Mapping):
        text = content[0].get("text")
        return text if isinstance(text, str) else None
    return None
