"""The adapters (LoRA) that a request asks for itself: pure.

What a slot holds was computed with them. llama-server takes a prompt up all the same where the next request
asks for none, so a conversation under other adapters is another conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

DIGITS = 12


def adapters_in(document: Mapping[str, Any] | None) -> str:
    """A digest of their ids and scales; empty for a request that asks for none."""
    asked = None if document is None else document.get("lora")
    if not isinstance(asked, list) or not asked:
        return ""
    return sha256(" ".join(map(_named, asked)).encode()).hexdigest()[:DIGITS]


def _named(entry: object) -> str:
    fields = entry if isinstance(entry, Mapping) else {}
    return ":".join(_number(fields.get(name)) for name in ("id", "scale"))


def _number(value: object) -> str:
    return str(float(value)) if isinstance(value, int | float) else ""
