"""What a model file says about its model: the key-value header of a GGUF file, and nothing behind it.

Only scalars, short strings and short lists of numbers are kept; the vocabulary is walked over.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.opened import open_regular
from kvproxy.upstream.architectures import kind_of, sliding_window_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DIGEST_BYTES = 1 << 20
MOST_PAIRS = 65_536
MOST_SHARDS = 1_024
MOST_STRINGS = 1 << 21
"""Of all arrays together; the largest vocabularies have some hundred thousand, and as many merges."""
LONGEST_KEY = 1 << 16
LONGEST_STRING = 1 << 16
LONGEST_LIST = 4_096
"""Values that are longer are passed over: no trait is."""
_BUFFER_BYTES = 1 << 18
_STRING = 8
_ARRAY = 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_STATE_KEYS = ("ssm.", "shortconv.", "wkv.", "kda.", "attention.recurrent_layers")

Value = int | float | str | tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Equal for equal files, as far as can be told without reading gigabytes.

    Size and time are those of all parts of a split model together: the sum, and the newest. The digest is
    that of the first MiB (of the first part), as hex digits.
    """

    size_bytes: int
    mtime_ns: int
    head_sha256: str


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Lists have one number per layer, or a single one for all. `window` is in tokens; 0 means none."""

    architecture: str
    kind: MemoryKind
    window: int | None
    has_state: bool
    blocks: int | None
    embedding_length: int | None
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    identity: ModelIdentity

    @property
    def sliding_window(self) -> int | None:
        """Tokens of a window that slides, not chunked and not symmetric; None where that is not known."""
        is_windowed = self.kind is MemoryKind.SLIDING_WINDOW
        return sliding_window_of(self.architecture, self.window) if is_windowed else None


class _Damaged(Exception):
    """Not a GGUF file we know. Never leaves this module."""


def read_model_traits(path: Path) -> ModelTraits | None:
    """None if the file cannot be read or is no GGUF file. Never raises.

    Links are followed: model caches are made of them. Blocks, up to a second for a large vocabulary. Of a
    split model any part may be named, the first one is read.
    """
    try:
        parts = _parts_of(Path(os.path.realpath(path)))
        with open_regular(parts[0]) as file, io.BufferedReader(file, _BUFFER_BYTES) as buffered:
            identity = _identity(buffered, parts)
            return _traits(_Header(buffered).pairs(), identity)
    except (OSError, ValueError, _Damaged):  # ValueError: a path with a null character
        return None


def _parts_of(path: Path) -> list[Path]:
    match = _SHARD.search(path.name)
    if match is None:
        return [path]
    count, stem = int(match[2]), path.name[: match.start()]
    if not 1 <= int(match[1]) <= count <= MOST_SHARDS:
        return [path]
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _identity(file: io.BufferedReader[io.FileIO], parts: list[Path]) -> ModelIdentity:
    digest = hashlib.sha256(file.read(DIGEST_BYTES)).hexdigest()
    file.seek(0)
    stats = [os.fstat(file.fileno()), *(part.stat() for part in parts[1:])]
    return ModelIdentity(sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats), digest)


def _traits(pairs: dict[str, Value], identity: ModelIdentity) -> ModelTraits:
    architecture = pairs.get("general.architecture")
    if not isinstance(architecture, str):
        raise _Damaged
    window = _number(pairs, f"{architecture}.attention.sliding_window")
    has_state = _has_state(pairs, architecture)
    heads = _numbers(pairs, f"{architecture}.attention.head_count")
    kv_heads = _numbers(pairs, f"{architecture}.attention.head_count_kv") or heads
    return ModelTraits(
        architecture=architecture,
        kind=kind_of(architecture, has_state=has_state, window=window, kv_heads=kv_heads),
        window=window,
        has_state=has_state,
        blocks=_number(pairs, f"{architecture}.block_count"),
        embedding_length=_number(pairs, f"{architecture}.embedding_length"),
        heads=heads,
        kv_heads=kv_heads,
        identity=identity,
    )


def _has_state(pairs: dict[str, Value], architecture: str) -> bool:
    return any(key.startswith(tuple(f"{architecture}.{start}" for start in _STATE_KEYS)) for key in pairs)


def _number(pairs: dict[str, Value], key: str) -> int | None:
    value = pairs.get(key)
    return value if isinstance(value, int) else None


def _numbers(pairs: dict[str, Value], key: str) -> tuple[int, ...]:
    value = pairs.get(key)
    values = value if isinstance(value, tuple) else (value,)
    return tuple(item for item in values if isinstance(item, int))


class _Header:
    """Little-endian values, one after the other. Raises `_Damaged` rather than go behind the file's end."""

    def __init__(self, file: io.BufferedReader[io.FileIO]) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size
        self._strings_left = MOST_STRINGS

    def pairs(self) -> dict[str, Value]:
        if self._take(4) != MAGIC or self._scalar("I") not in VERSIONS:
            raise _Damaged
        self._scalar("Q")  # tensors
        count = self._scalar("Q")
        if count > MOST_PAIRS:
            raise _Damaged
        found: dict[str, Value] = {}
        for _ in range(int(count)):
            key = self._string(LONGEST_KEY)
            value = self._value(int(self._scalar("I")))
            if key is None:
                raise _Damaged
            if value is not None:
                found[key] = value
        return found

    def _value(self, kind: int) -> Value | None:
        if kind == _STRING:
            return self._string(LONGEST_STRING)
        if kind == _ARRAY:
            return self._array(int(self._scalar("I")), int(self._scalar("Q")))
        return self._scalar(_letter(kind))

    def _array(self, kind: int, count: int) -> tuple[int | float, ...] | None:
        if kind == _STRING:
            self._skip_strings(count)
            return None
        letter = _letter(kind)
        size = struct.calcsize(f"<{letter}") * count
        if count > LONGEST_LIST:
            self._skip(size)
            return None
        return struct.unpack(f"<{count}{letter}", self._take(size))

    def _skip_strings(self, count: int) -> None:
        self._strings_left -= count
        if self._strings_left < 0:
            raise _Damaged
        read = self._file.read
        for _ in range(count):  # written out: a vocabulary has a million of them
            size = int.from_bytes(read(8), "little")
            self._left -= 8 + size
            if self._left < 0:
                raise _Damaged
            if size < _BUFFER_BYTES:
                read(size)
            else:
                self._file.seek(size, os.SEEK_CUR)

    def _string(self, longest: int) -> str | None:
        """None for one that is longer, which is skipped."""
        size = int(self._scalar("Q"))
        if size > longest:
            self._skip(size)
            return None
        return self._take(size).decode("utf-8", "replace")

    def _scalar(self, letter: str) -> int | float:
        value: int | float = struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]
        return value

    def _take(self, count: int) -> bytes:
        self._spend(count)
        data = self._file.read(count)
        if len(data) < count:
            raise _Damaged
        return data

    def _skip(self, count: int) -> None:
        self._spend(count)
        self._file.seek(count, os.SEEK_CUR)

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _Damaged


def _letter(kind: int) -> str:
    if kind not in _SCALARS:
        raise _Damaged
    return _SCALARS[kind]
