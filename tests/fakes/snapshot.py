"""The snapshot file as bytes: the real head, then filler in place of keys and values. Pure."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

MAGIC = b"qsgg"
VERSION = 4
# A file that misses fewer bytes than this makes the real server abort instead of refusing it.
ABORT_BELOW = 4


class Refusal(Enum):
    INVALID = auto()
    ABORT = auto()


@dataclass(frozen=True, slots=True)
class Loaded:
    tokens: list[int]
    n_read: int


def encode(tokens: Sequence[int], *, geometry: str, bytes_per_token: int) -> bytes:
    packed = [0xFFFFFFFF, 1, len(tokens), *tokens, 0]
    head = MAGIC + struct.pack(f"<II{len(packed)}I", VERSION, len(packed), *packed)
    cells = struct.pack("<III", 1, len(tokens), _geometry_mark(geometry) if tokens else 0)
    return head + cells + b"".join(_row(token, bytes_per_token) for token in tokens)


def decode(data: bytes, *, geometry: str, bytes_per_token: int) -> Loaded | Refusal:
    tokens = _decode_head(data)
    if tokens is None:
        return Refusal.INVALID
    whole = encode(tokens, geometry=geometry, bytes_per_token=bytes_per_token)
    missing = len(whole) - len(data)
    if missing > 0:
        return Refusal.ABORT if missing < ABORT_BELOW and tokens else Refusal.INVALID
    offset = 12 + 4 * (len(tokens) + 4)
    if data[offset : offset + 12] != whole[offset : offset + 12]:
        return Refusal.INVALID
    return Loaded(tokens, len(whole))


def _decode_head(data: bytes) -> list[int] | None:
    if len(data) < 24 or data[:4] != MAGIC:
        return None
    version, n_packed, _, _, n_tokens = struct.unpack_from("<IIIII", data, 4)
    if version != VERSION or n_packed != n_tokens + 4 or len(data) < 12 + 4 * n_packed:
        return None
    return list(struct.unpack_from(f"<{n_tokens}I", data, 24))


def _geometry_mark(geometry: str) -> int:
    return zlib.crc32(geometry.encode())


@lru_cache(maxsize=1024)
def _row(token: int, size: int) -> bytes:
    return struct.pack("<I", token * 2654435761 % 2**32) * (size // 4)
