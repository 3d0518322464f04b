"""What these tests are made of: slot files, generations, manifests, publications, a clock, a sink."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from kvproxy.identifiers import Owner, Revision, ServerName, SessionKey, SlotId, SnapshotName
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Generation, Manifest
from kvproxy.snapshots.names import new_name
from kvproxy.snapshots.store import Publication
from kvproxy.telemetry.events import Event

E = TypeVar("E")

OWNER = Owner("0123abcd")
KEY = SessionKey("a" * 32)
OTHER_KEY = SessionKey("b" * 32)
FINGERPRINT = Fingerprint.from_dict({"model_path": "/models/one.gguf", "build": "b11434"})
OTHER_FINGERPRINT = Fingerprint.from_dict({"model_path": "/models/two.gguf", "build": "b11434"})


@dataclass
class FakeClock:
    seconds: float = 1_000.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return self.seconds


@dataclass
class Sink:
    """Keeps what was emitted."""

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def packed_file(tokens: Sequence[int], *, state: bytes = b"kv" * 50, version: int = 4) -> bytes:
    block = words(-1, 1, len(tokens), *tokens, 0)
    return b"qsgg" + words(version, len(block) // 4) + block + state


def plain_file(tokens: Sequence[int], *, state: bytes = b"kv" * 50, version: int = 2) -> bytes:
    return b"qsgg" + words(version, len(tokens), *tokens) + state


def generation(**changes: Any) -> Generation:
    made = Generation(
        name=new_name(OWNER), tokens=3, size_bytes=100, revision=Revision(1), saved_at=900.0, slot=SlotId(0)
    )
    return made.model_copy(update=changes)


def manifest(**changes: Any) -> Manifest:
    made = Manifest(
        key=KEY,
        server=ServerName("main"),
        model="one",
        client_digest="c" * 32,
        fingerprint=FINGERPRINT,
        current=generation(),
        created_at=800.0,
        last_used_at=900.0,
    )
    return made.model_copy(update=changes)


def publication(one: Generation | None = None, **changes: Any) -> Publication:
    made = Publication(
        key=KEY,
        server=ServerName("main"),
        model="one",
        client_digest="c" * 32,
        fingerprint=FINGERPRINT,
        generation=one or generation(),
    )
    return replace(made, **changes)


def put(directory: Path, data: bytes, name: SnapshotName | None = None) -> SnapshotName:
    """A slot file in a save directory, as the server leaves it."""
    name = name or new_name(OWNER)
    (directory / name).write_bytes(data)
    return name
