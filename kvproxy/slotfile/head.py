"""The head of a slot file: enough to tell a snapshot from anything else, and how many tokens it holds.

Little-endian words: magic "qsgg", format version, word count of the token block, then the block. Newer
builds pack it as -1, 1, token count, tokens, media; older ones write the token ids and nothing else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from kvproxy.snapshots.opened import open_regular

MAGIC = b"qsgg"
HEAD_BYTES = 24
OLDEST_VERSION = 2
NEWEST_VERSION = 4
_WORD_BYTES = 4
_FIXED_BYTES = 12
_PACKED_MARK = -1
_PACKED_LAYOUT = 1
_PACKED_EXTRA_WORDS = 4
"""Mark, layout, token count and media count."""


@dataclass(frozen=True, slots=True)
class Head:
    """`tokens` is None for a format newer than we know: it may count them elsewhere.

    `token_block_end` is the byte where the KV state begins (in a format we know).
    """

    version: int
    tokens: int | None
    token_block_end: int


def parse_head(data: bytes) -> Head | None:
    """`data` is the file's first 24 bytes (fewer if the file is shorter); None if it is no slot file."""
    if len(data) < _FIXED_BYTES or data[:4] != MAGIC:
        return None
    version, words = struct.unpack_from("<II", data, 4)
    if version < OLDEST_VERSION:
        return None
    if version > NEWEST_VERSION:
        return Head(version, None, _FIXED_BYTES)
    tokens = _count_tokens(data, words)
    return None if tokens is None else Head(version, tokens, _FIXED_BYTES + words * _WORD_BYTES)


def _count_tokens(data: bytes, words: int) -> int | None:
    # The mark decides, not the version: the packed block came without a new version number.
    if words == 0:
        return 0
    if len(data) < _FIXED_BYTES + _WORD_BYTES:
        return None
    if struct.unpack_from("<i", data, _FIXED_BYTES)[0] != _PACKED_MARK:
        return words
    if len(data) < HEAD_BYTES:
        return None
    layout, tokens = struct.unpack_from("<II", data, _FIXED_BYTES + _WORD_BYTES)
    fits = tokens + _PACKED_EXTRA_WORDS <= words
    return int(tokens) if layout == _PACKED_LAYOUT and fits else None


def read_head(path: Path) -> Head | None:
    """None if there is no such regular file, it cannot be read or it is no slot file. Blocks."""
    try:
        with open_regular(path) as file:
            return parse_head(file.read(HEAD_BYTES))
    except OSError:
        # Whatever keeps us from reading it, there is no head to show; callers that need the reason
        # open the file themselves.
        return None
