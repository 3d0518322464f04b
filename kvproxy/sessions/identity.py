"""Which conversation a request says it belongs to: pure.

The first of the configured headers that is present decides, then the first of the fields of the body. An id
that is present but unfit (empty, too long, control characters, two different values) means *no* id, not the
next place: grouping a request under a session its client did not name is worse than not grouping it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import orjson

from kvproxy.frozen import frozen
from kvproxy.sessions.key import ClientId
from kvproxy.sessions.sources import NOT_IDENTITY, PATTERN

MAX_ID_BYTES = 256
"""What the strictest of the known gateways accepts."""

_TURN = "x-codex-turn-metadata"
THREAD = "thread-id"
CLAUDE = "x-claude-code-session-id"
"""Names under which an id is known wherever it was found."""

Document = Mapping[str, Any]


class MultiHeaders(Protocol):
    def getall(self, key: str, default: list[str], /) -> list[str]: ...
    def keys(self) -> Any: ...
    def __contains__(self, key: object, /) -> bool: ...


@frozen
class Identity:
    """`agent` is the sub-agent within the conversation, empty for the main one. `parent` is the conversation
    and `parent_agent` the agent in it that this one comes from, if the client told."""

    client: ClientId | None = None
    agent: str = ""
    parent: ClientId | None = None
    parent_agent: str = ""
    is_disputed: bool = False
    """The header's id was taken although the body names another one."""


NOBODY = Identity()


@dataclass(frozen=True)
class Sources:
    """The headers and fields of the body that are believed, in order."""

    headers: tuple[str, ...]
    body_fields: tuple[str, ...] = ()

    @cached_property
    def disputing(self) -> tuple[str, ...]:
        """The fields that mean what a header means, and must not contradict it."""
        return tuple(field for field in self.body_fields if f"body.{field}" in _SESSION_FIELDS)


class _Unfit(Enum):
    """There is an id, but one that cannot be used."""

    UNFIT = 0


_Found = ClientId | _Unfit | None


def identify(headers: MultiHeaders, document: Document | None, sources: Sources) -> Identity:
    """`document` is the body, None if it could not be understood."""
    found = _from_headers(headers, sources.headers)
    # With an id in a header, of the body only what could contradict it is of interest.
    fields = sources.body_fields if found is None else sources.disputing
    from_body = None if document is None else _from_body(document, fields)
    if found is None:
        found = from_body
    if not isinstance(found, ClientId):
        return NOBODY
    agent = _plain(headers, "x-claude-code-agent-id")
    parent, parent_agent = _lineage(headers, found, agent)
    is_disputed = from_body is not None and _is_disputed(found, from_body)
    return Identity(found, agent, parent, parent_agent, is_disputed)


def tenant_of(headers: MultiHeaders) -> str:
    """Whose key the request came with, as a digest; empty without one."""
    for name in ("authorization", "x-api-key"):
        for value in headers.getall(name, []):
            key = value.removeprefix("Bearer ").strip()
            return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return ""


# headers


def _from_headers(headers: MultiHeaders, names: Sequence[str]) -> _Found:
    for name in names:
        if name == PATTERN:
            found = _by_pattern(headers)
        else:
            found = _from_header(headers, name) if name in headers else None
        if found is not None:
            return found
    return None


def _from_header(headers: MultiHeaders, name: str) -> _Found:
    values = headers.getall(name, [])
    reader = _READERS.get(name)
    if reader is None:
        return _fit(name, values)
    return reader(headers, values)


def _codex_thread(headers: MultiHeaders, values: list[str]) -> _Found:
    """So common a name counts only beside others of the client that means it by that."""
    is_codex = any(name in headers for name in ("session-id", "originator")) or any(
        name.lower().startswith("x-codex-") for name in headers.keys()
    )
    return _fit(THREAD, values) if is_codex else None


def _codex_metadata(headers: MultiHeaders, values: list[str]) -> _Found:
    thread = _object(values[0]).get("thread_id")
    return _fit(THREAD, [thread]) if isinstance(thread, str) else None


def _openwebui_chat(headers: MultiHeaders, values: list[str]) -> _Found:
    """The temporary chats of a browser tab all share one id."""
    return None if values[0].strip().startswith("local:") else _fit("x-openwebui-chat-id", values)


def _stream(headers: MultiHeaders, values: list[str]) -> _Found:
    """What follows two colons is the model."""
    return _fit("x-conversation-id", [value.partition("::")[0] for value in values])


_READERS = {
    "thread-id": _codex_thread,
    _TURN: _codex_metadata,
    "x-openwebui-chat-id": _openwebui_chat,
    "x-conversation-id": _stream,
}

_SESSION_HEADER = re.compile(r"x-[a-z0-9-]+-session-id")
_SESSION_VALUE = re.compile(r"[A-Za-z0-9_.:-]{8,}")


def _by_pattern(headers: MultiHeaders) -> _Found:
    names = {name.lower() for name in headers.keys()}
    for name in sorted(names):
        if _SESSION_HEADER.fullmatch(name) and name not in NOT_IDENTITY:
            values = headers.getall(name, [])
            if all(_SESSION_VALUE.fullmatch(value.strip()) for value in values):
                return _fit(name, values)
    return None


# the body


def _from_body(document: Document, paths: Sequence[str]) -> _Found:
    for path in paths:
        value = _at(document, path) if "." in path else document.get(path)
        if value is None:
            continue
        if path == "metadata.user_id":
            value = _session_of_user(value)
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return _fit(_NAMESPACES.get(path, f"body.{path}"), [str(value)])
    return None


_NAMESPACES = {"client_metadata.thread_id": THREAD, "metadata.user_id": CLAUDE}
"""The same id also comes as a header, with the same client's other requests."""

_LEGACY_USER = re.compile(r"_session_([0-9a-f-]{36})$")


def _session_of_user(value: object) -> str | None:
    """Whoever puts more than a person into this field says so; anything else is a person."""
    if not isinstance(value, str):
        return None
    session = _object(value).get("session_id")
    if isinstance(session, str):
        return session
    legacy = _LEGACY_USER.search(value)
    return legacy[1] if legacy else None


def _at(document: Document, path: str) -> object:
    value: object = document
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _is_disputed(found: ClientId, from_body: _Found) -> bool:
    """Only where both mean the same thing: an agent's header does not contradict its tree in the body."""
    if not isinstance(from_body, ClientId) or from_body.namespace not in _SESSION_FIELDS:
        return False
    return from_body.value != found.value


_SESSION_FIELDS = frozenset({"body.session_id", "body.litellm_session_id"})


# lineage


def _lineage(headers: MultiHeaders, client: ClientId, agent: str) -> tuple[ClientId | None, str]:
    if agent:
        return client, _plain(headers, "x-claude-code-parent-agent-id")
    if session := _plain(headers, "x-parent-session-id"):
        return ClientId(client.namespace, session), ""
    thread = _plain(headers, "x-codex-parent-thread-id") or _forked_from(headers)
    return (ClientId(THREAD, thread), "") if thread else (None, "")


def _forked_from(headers: MultiHeaders) -> str:
    if _TURN not in headers:
        return ""
    thread = _object(headers.getall(_TURN, [])[0]).get("forked_from_thread_id")
    found = _fit(THREAD, [thread]) if isinstance(thread, str) else None
    return found.value if isinstance(found, ClientId) else ""


def _plain(headers: MultiHeaders, name: str) -> str:
    """The value of a header that only adds to an id; empty if it is unfit."""
    if name not in headers:
        return ""
    found = _fit(name, headers.getall(name, []))
    return found.value if isinstance(found, ClientId) else ""


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _fit(namespace: str, values: Sequence[str]) -> ClientId | _Unfit:
    if len(set(values)) != 1:
        return _Unfit.UNFIT
    value = values[0].strip()
    if not value or _CONTROL.search(value) or len(value.encode("utf-8", "surrogateescape")) > MAX_ID_BYTES:
        return _Unfit.UNFIT
    return ClientId(namespace, value)


def _object(text: str) -> Mapping[str, Any]:
    if "{" not in text:
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
