"""The snapshot file as bytes, laid out as the real one of a model of one layer that keeps keys only. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

MAGIC = b"qsgg"
VERSION = 4
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
# A file that misses fewer bytes than this makes the real server abort instead of refusing it.
ABORT_BELOW = 4


class Refusal(Enum):
    INVALID = auto()
    ABORT = auto()


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a server and a file must have in common. `streams` is 1 where all slots share one memory."""

    streams: int = 1
    kv_type: str = "f16"
    bytes_per_token: int = 512


@dataclass(frozen=True, slots=True)
class Loaded:
    tokens: list[int]
    n_read: int


def encode(tokens: Sequence[int], geometry: Geometry) -> bytes:
    packed = [0xFFFFFFFF, 1, len(tokens), *tokens, 0]
    head = MAGIC + struct.pack(f"<II{len(packed)}I", VERSION, len(packed), *packed)
    rows = b"".join(_row(token, geometry.bytes_per_token) for token in tokens)
    return head + _before_rows(len(tokens), geometry) + rows + _other_streams(len(tokens), geometry)


def decode(data: bytes, geometry: Geometry) -> Loaded | Refusal:
    tokens = _decode_head(data)
    if tokens is None:
        return Refusal.INVALID
    whole = encode(tokens, geometry)
    missing = len(whole) - len(data)
    if missing > 0:
        return Refusal.ABORT if missing < ABORT_BELOW and tokens else Refusal.INVALID
    start, end = 12 + 4 * (len(tokens) + 4), len(whole) - geometry.bytes_per_token * len(tokens)
    if tokens and data[start:end] != whole[start:end]:
        return Refusal.INVALID
    return Loaded(tokens, len(whole))


def _before_rows(count: int, geometry: Geometry) -> bytes:
    """Streams, and for the first of them its cells and the head of the one tensor."""
    if not count:
        return struct.pack("<I", geometry.streams)
    cells = b"".join(struct.pack("<iIi", position, 1, 0) for position in range(count))
    tensor = struct.pack("<IIII", 0, 1, 0, 0) + struct.pack(
        "<iQ", KV_TYPES[geometry.kv_type], geometry.bytes_per_token
    )
    return struct.pack("<II", geometry.streams, count) + cells + tensor


def _other_streams(count: int, geometry: Geometry) -> bytes:
    return bytes(4 * (geometry.streams - bool(count)))


def _decode_head(data: bytes) -> list[int] | None:
    if len(data) < 24 or data[:4] != MAGIC:
        return None
    version, n_packed, _, _, n_tokens = struct.unpack_from("<IIIII", data, 4)
    if version != VERSION or n_packed != n_tokens + 4 or len(data) < 12 + 4 * n_packed:
        return None
    return list(struct.unpack_from(f"<{n_tokens}I", data, 24))


@lru_cache(maxsize=1024)
def _row(token: int, size: int) -> bytes:
    return struct.pack("<I", token * 2654435761 % 2**32) * (size // 4)
