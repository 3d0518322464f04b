"""Slot files as llama-server writes them, with noise for keys and values."""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Sequence

F16 = 1
Q8_0 = 8


def word(*values: int) -> bytes:
    return b"".join(struct.pack("<i" if value < 0 else "<I", value) for value in values)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def tensor(rows: int, row_bytes: int = 64, type_id: int = F16) -> bytes:
    return struct.pack("<iQ", type_id, row_bytes) + noise(rows * row_bytes)


def transposed(cells: int, elements: int = 32, type_id: int = F16, element_bytes: int = 2) -> bytes:
    return struct.pack("<iII", type_id, element_bytes, elements) + noise(cells * elements * element_bytes)


def cells(positions: Sequence[int], sequence: int = 0, *, is_extended: bool = False) -> bytes:
    extension = (5, 6, 77) if is_extended else ()
    return b"".join(word(position, 1, *extension, sequence) for position in positions)


def attention(
    positions: Sequence[int],
    *,
    streams: int = 1,
    stream: int = 0,
    sequence: int | None = None,
    layers: int = 2,
    type_id: int = F16,
    row_bytes: int = 64,
    rotations: tuple[int, int] = (0, 0),
    is_extended: bool = False,
    is_transposed: bool = False,
    has_values: bool = True,
) -> bytes:
    count = len(positions)
    keys = tensor(count, row_bytes, type_id) * layers
    values = transposed(count) if is_transposed else tensor(count, row_bytes, type_id)
    return b"".join(
        (
            word(streams),
            word(0) * stream,
            word(count),
            cells(positions, stream if sequence is None else sequence, is_extended=is_extended),
            word(int(is_transposed), layers, *rotations),
            keys,
            values * layers if has_values else b"",
            word(0) * (streams - stream - 1),
        )
    )


def recurrent(
    position: int, *, layers: int = 3, with_state: int = 3, r_bytes: int = 48, s_bytes: int = 80
) -> bytes:
    r, s = tensor(1, r_bytes, 0), tensor(1, s_bytes, 0)
    return word(1, position, 0, 0, layers) + r * with_state + s * with_state


def slot_file(tokens: int, *blocks: bytes, media: Sequence[bytes] = (), version: int = 4) -> bytes:
    """Token ids count up from 100."""
    ids = array("i", range(100, 100 + tokens)).tobytes()
    chunks = b"".join(word(len(chunk)) + chunk for chunk in media)
    packed = word(-1, 1, tokens) + ids + word(len(media), *range(len(media))) + chunks
    packed += bytes(-len(packed) % 4)
    return b"qsgg" + word(version, len(packed) // 4) + packed + b"".join(blocks)


def plain_slot_file(tokens: int, *blocks: bytes) -> bytes:
    return b"qsgg" + word(4, tokens, *range(100, 100 + tokens)) + b"".join(blocks)


TOKENS = 20
ALL = range(TOKENS)
NEWEST = range(TOKENS - 8, TOKENS)
LAST = TOKENS - 1

FULL = slot_file(TOKENS, attention(ALL))
FULL_TRANSPOSED = slot_file(TOKENS, attention(ALL, is_transposed=True, streams=4, stream=2))
FULL_QUANTISED = slot_file(TOKENS, attention(ALL, type_id=Q8_0, row_bytes=68, rotations=(64, 64)))
FULL_EXTENDED = slot_file(TOKENS, attention(ALL, is_extended=True), media=[b"picture"])
FULL_WITHOUT_VALUES = slot_file(TOKENS, attention(ALL, has_values=False))
WINDOW = slot_file(TOKENS, attention(ALL), attention(NEWEST, layers=3))
WINDOW_NOT_FILLED = slot_file(TOKENS, attention(ALL), attention(ALL, layers=3))
WINDOW_IN_STREAMS = slot_file(
    TOKENS, attention(ALL, streams=3, stream=1), attention(NEWEST, streams=3, stream=1, layers=1)
)
HYBRID = slot_file(TOKENS, attention(ALL), recurrent(LAST, layers=4, with_state=2))
HYBRID_EMPTY_S = slot_file(TOKENS, attention(ALL), recurrent(LAST, layers=4, with_state=2, s_bytes=0))
HYBRID_WINDOW = slot_file(TOKENS, attention(ALL), attention(NEWEST), recurrent(LAST, layers=4, with_state=2))
HYBRID_INDEXED = slot_file(
    TOKENS, attention(ALL), recurrent(LAST, layers=4, with_state=2), attention(ALL, has_values=False)
)
RECURRENT = slot_file(TOKENS, recurrent(LAST))
KEY_INDEX = slot_file(
    TOKENS, attention(ALL, has_values=False), attention(ALL, has_values=False, row_bytes=16)
)
