"""The manifest: the small file that makes a snapshot exist. One per session and fingerprint."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from kvproxy.identifiers import Revision, ServerName, SessionKey, SlotId, SnapshotName
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.names import NAME_PATTERN

SCHEMA_VERSION: Final = 1
CLIENT_DIGEST_DIGITS = 32


def client_digest(client_id: str) -> str:
    """What is stored of the client's own session id: enough to look it up by, not to read it back."""
    return hashlib.sha256(client_id.encode("utf-8", "surrogatepass")).hexdigest()[:CLIENT_DIGEST_DIGITS]


def _read_fingerprint(value: object) -> Fingerprint:
    if isinstance(value, Fingerprint):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("not an object")
    if not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise ValueError("every field must be a string")
    return Fingerprint.from_dict(value)


def digest_of_ids(ids: Sequence[int]) -> str:
    """The same for the same token ids, on any machine."""
    numbers = array("i", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return hashlib.sha256(numbers.tobytes()).hexdigest()


_FingerprintField = Annotated[
    Fingerprint,
    PlainValidator(_read_fingerprint),
    PlainSerializer(Fingerprint.as_dict, return_type=dict[str, str]),
]


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


_SnapshotNameField = Annotated[SnapshotName, Field(pattern=f"^{NAME_PATTERN}$")]


class FileIdentity(_Closed):
    """Tells without reading whether a file is still the one that was checked. Times are nanoseconds."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class Origin(_Closed):
    """Where a file comes from that the server did not write itself: `name` is the file it was made of."""

    alteration: Annotated[Alteration, Field(strict=False)]
    name: _SnapshotNameField


class Generation(_Closed):
    """One KV file. `identity` and `sha256` are None where the directory is not visible or not yet hashed."""

    name: _SnapshotNameField
    tokens: Annotated[int, Field(gt=0)]
    size_bytes: Annotated[int, Field(gt=0)]
    revision: Annotated[Revision, Field(ge=0)]
    saved_at: float
    """Unix seconds."""
    slot: SlotId
    """Where it was saved from."""
    form: Literal["plain", "boundary"] = "plain"
    """As the answer left the slot, or where the reply began."""
    ids_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Of the token ids, by which it is known whether a prompt extends them (see `digest_of_ids`)."""
    origin: Origin | None = None
    """None as the server wrote it."""
    identity: FileIdentity | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    invalid_reason: str | None = None

    @property
    def is_valid(self) -> bool:
        return self.invalid_reason is None

    @property
    def alteration(self) -> Alteration | None:
        return None if self.origin is None else self.origin.alteration


class Manifest(_Closed):
    """`current` is the newest complete generation, `previous` the one to fall back on."""

    schema_version: Literal[1] = SCHEMA_VERSION
    key: Annotated[SessionKey, Field(pattern=r"^[0-9a-f]{32}$")]
    server: ServerName
    model: str
    client_digest: str
    fingerprint: _FingerprintField
    current: Generation
    previous: Generation | None = None
    created_at: float
    """Unix seconds."""
    last_used_at: float
    """Unix seconds."""

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Newest first."""
        return (self.current,) if self.previous is None else (self.current, self.previous)

    @property
    def size_bytes(self) -> int:
        return sum(generation.size_bytes for generation in self.generations)

    def generation(self, name: SnapshotName) -> Generation | None:
        return next((one for one in self.generations if one.name == name), None)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes that are no manifest of ours, and why."""

    reason: str


def encode(manifest: Manifest) -> bytes:
    return manifest.model_dump_json(indent=1).encode() + b"\n"


def decode(data: bytes) -> Manifest | Unreadable:
    try:
        found = Manifest.model_validate_json(data)
    except ValidationError as error:
        return Unreadable(_first_complaint(error))
    # The default is for us who write it; a file that does not say its version is not one of ours.
    return found if "schema_version" in found.model_fields_set else Unreadable("no schema_version")


def _first_complaint(error: ValidationError) -> str:
    complaint = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in complaint["loc"])
    return f"{where}: {complaint['msg']}" if where else complaint["msg"]


def generation_to_restore(
    manifest: Manifest, serves: Callable[[Generation], bool] = lambda _: True
) -> Generation | None:
    """The newest valid generation of those that `serves` says are of use."""
    return next((one for one in manifest.generations if one.is_valid and serves(one)), None)


def with_generation(manifest: Manifest, name: SnapshotName, **changes: Any) -> Manifest:
    """The manifest with `changes` made to the generation called `name`."""

    def changed(one: Generation | None) -> Generation | None:
        return one.model_copy(update=changes) if one is not None and one.name == name else one

    update = {"current": changed(manifest.current), "previous": changed(manifest.previous)}
    return manifest.model_copy(update=update)


def without_generations(manifest: Manifest, names: Collection[SnapshotName]) -> Manifest | None:
    """The manifest without these generations; None if nothing is left."""
    kept = [one for one in manifest.generations if one.name not in names]
    if not kept:
        return None
    return manifest.model_copy(update={"current": kept[0], "previous": kept[1] if len(kept) > 1 else None})
