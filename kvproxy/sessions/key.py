"""The key of a session, and what a request says of how it wants to be treated: pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

from kvproxy.frozen import frozen
from kvproxy.identifiers import ServerName, SessionKey


@frozen
class ClientId:
    """What the client called its conversation: `namespace` is where it said so."""

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


@lru_cache(maxsize=1024)
def derive_key(server: ServerName, tenant: str, model: str, client: ClientId, branch: str = "") -> SessionKey:
    """The same conversation gives the same key after any restart; no two parts can run together."""
    hasher = hashlib.sha256()
    for part in ("kvproxy-session-1", server, tenant, model, client.namespace, client.value, branch):
        raw = part.encode("utf-8", "surrogateescape")
        hasher.update(len(raw).to_bytes(4, "big") + raw)
    return SessionKey(hasher.hexdigest()[:32])


_BYPASS, _PURPOSE, _PERSIST = "X-KVProxy-Bypass", "X-KVProxy-Purpose", "X-KVProxy-Persist"
"""Looked for before they are read: hardly any request has one."""


def wants_bypass(headers: Mapping[str, str]) -> bool:
    return _BYPASS in headers and headers[_BYPASS].strip() == "1"


def is_declared_auxiliary(headers: Mapping[str, str]) -> bool:
    return _PURPOSE in headers and headers[_PURPOSE].strip().lower() == "auxiliary"


def forbids_persistence(headers: Mapping[str, str]) -> bool:
    return _PERSIST in headers and headers[_PERSIST].strip().lower() == "no"
