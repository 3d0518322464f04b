"""How a conversation is recognised, and the key it gets: pure.

The client's id comes from the first of the configured headers that is present. An id that is present but
unfit (empty, too long, control characters, two different values) means *no* id, not the next header:
grouping a request under a session its client did not name is worse than not grouping it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from kvproxy.identifiers import ServerName, SessionKey

MAX_ID_BYTES = 256
"""What the strictest of the known gateways accepts."""


class MultiHeaders(Protocol):
    def getall(self, key: str, default: list[str], /) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class ClientId:
    """What the client called its conversation: `namespace` is the header's name."""

    namespace: str
    value: str

    @property
    def digest(self) -> str:
        """32 hex digits by which an operator finds a session by its id; the id itself is never stored."""
        return digest_of(self.value)


@lru_cache(maxsize=1024)
def digest_of(value: str) -> str:
    """The digest under which a client's own session id is known."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def read_client_id(headers: MultiHeaders, names: Sequence[str]) -> ClientId | None:
    """The first of `names` that is present decides, for good or ill."""
    for name in names:
        values = headers.getall(name, [])
        if values:
            return _fit(name.lower(), values)
    return None


def _fit(namespace: str, values: list[str]) -> ClientId | None:
    if len(set(values)) != 1:
        return None
    value = values[0].strip()
    raw = value.encode("utf-8", "surrogateescape")
    if not value or len(raw) > MAX_ID_BYTES or any(byte < 0x20 or byte == 0x7F for byte in raw):
        return None
    return ClientId(namespace, value)


@lru_cache(maxsize=1024)
def derive_key(server: ServerName, tenant: str, model: str, client: ClientId, branch: str = "") -> SessionKey:
    """The same conversation gives the same key after any restart; no two parts can run together."""
    hasher = hashlib.sha256()
    for part in ("kvproxy-session-1", server, tenant, model, client.namespace, client.value, branch):
        raw = part.encode("utf-8", "surrogateescape")
        hasher.update(len(raw).to_bytes(4, "big") + raw)
    return SessionKey(hasher.hexdigest()[:32])


def wants_bypass(headers: Mapping[str, str]) -> bool:
    return headers.get("X-KVProxy-Bypass", "").strip() == "1"


def is_declared_auxiliary(headers: Mapping[str, str]) -> bool:
    return headers.get("X-KVProxy-Purpose", "").strip().lower() == "auxiliary"


def forbids_persistence(headers: Mapping[str, str]) -> bool:
    return headers.get("X-KVProxy-Persist", "").strip().lower() == "no"
