"""How a conversation opens: pure. Two that open alike share the KV of their opening.

Only a hint, and only ever used to leave in a slot what the next conversation can use: the server compares
tokens, so a wrong guess costs nothing but an erase that was not made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from kvproxy.dialects.canonical import text_of
from kvproxy.dialects.reading import Reading
from kvproxy.dialects.shapes import NO_SHAPE, SHAPES

WORTH_CHARS = 1024
"""Shorter openings are computed faster than they are worth thinking about."""


def opening_of(reading: Reading | None) -> bytes | None:
    """A digest of the first words, the system prompt's or, where that is short, the first questions' too;
    None if there are few."""
    said, length = [], 0
    for text in _texts(reading) if reading is not None else ():
        said.append(text[: WORTH_CHARS - length])
        length += len(said[-1])
        if length == WORTH_CHARS:
            return hashlib.sha256("\n".join(said).encode("utf-8", "surrogatepass")).digest()[:16]
    return None


def _texts(reading: Reading) -> Iterator[str]:
    if reading.prompt is not None:
        yield reading.prompt[:WORTH_CHARS].decode("latin-1")
    shape = SHAPES.get(reading.label, NO_SHAPE)
    if shape.system:
        yield text_of(reading.document.get(shape.system))
    for message in reading.messages:
        yield text_of(message.get("content"))
