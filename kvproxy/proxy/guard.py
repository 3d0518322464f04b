"""Who may be asked for, and which doors stay shut: pure checks made before anything else.

The server matches routes on the percent-decoded path, so `/sl%6fts/0`, `/sl%u006fts/0`, `/slots%2f0`,
`/slots/0%00` and `/slots/0/` all reach a slot action. A path is therefore judged in the plainest form that
any server on the way could give it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple

from kvproxy.dialects.endpoints import decoded

_ABSOLUTE = re.compile(r"^[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)
_HOST = re.compile(r"^(\[[0-9a-f:.%]+\]|[^\[\]:/@\s]+)(?::(\d{1,5}))?$", re.IGNORECASE)
_DECODE_ROUNDS = 8
_SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})

_SHUT = frozenset({"/models/load", "/models/unload", "/cors-proxy", "/tools"})
_SHUT_TO_CHANGES = frozenset({"/slots", "/props", "/lora-adapters", "/models"})


class Target(NamedTuple):
    """A request line's target. `authority` is only there in absolute form, where it replaces Host."""

    path_and_query: str
    authority: str | None


def origin_form(raw: str) -> Target:
    """Path and query byte for byte, whichever form the target came in (RFC 9112 3.2)."""
    absolute = None if raw.startswith("/") else _ABSOLUTE.match(raw)
    if absolute is None:
        return Target(raw, None)
    rest = raw[absolute.end() :]
    return Target(rest if rest.startswith("/") else f"/{rest}", absolute[1])


def check_host(host: str | None, allowed: Iterable[str]) -> bool:
    """Whether `host`, a Host header's value, is on the list.

    Names compare without case; a port in an entry must match, none matches every port; "*" allows all.
    A page that rebinds its own name to our address cannot pass, because it cannot forge Host.
    """
    return _is_listed(host or "", tuple(allowed))


@lru_cache(maxsize=1024)
def _is_listed(host: str, entries: tuple[str, ...]) -> bool:
    if "*" in entries:
        return True
    asked = _split(host)
    if asked is None:
        return False
    name, port = asked
    return any(name == n and p in (None, port) for n, p in map(_split_entry, entries))


def _split(host: str) -> tuple[str, str | None] | None:
    match = _HOST.match(host)
    return (_plain_name(match[1]), match[2]) if match is not None else None


def _split_entry(entry: str) -> tuple[str, str | None]:
    return _split(entry) or (_plain_name(entry), None)


@lru_cache(maxsize=1024)
def _plain_name(name: str) -> str:
    bare = name.strip("[]").lower()
    try:
        return str(ip_address(bare))
    except ValueError:
        return bare


@lru_cache(maxsize=256)
def forbidden(method: str, raw_path: str, *, has_api_keys: bool = False) -> bool:
    """Whether a request asks for one of the server's management routes.

    With keys configured, reading `/slots` is one too: it shows other users' prompts.
    """
    path = _plainest(origin_form(raw_path).path_and_query.partition("?")[0])
    if path in _SHUT:
        return True
    if method.upper() in _SAFE:
        return has_api_keys and path == "/slots"
    return path in _SHUT_TO_CHANGES or path.startswith("/slots/")


def _plainest(path: str) -> str:
    """Decoded until nothing changes, without query, parameters, NUL, dot segments or empty segments."""
    path = re.split(r"[?#]", path, maxsplit=1)[0]
    for _ in range(_DECODE_ROUNDS):
        plainer = decoded(path)
        if plainer == path:
            break
        path = plainer
    path = re.split(r"[\0?#]", path.replace("\\", "/"), maxsplit=1)[0]
    segments: list[str] = []
    for segment in (s.partition(";")[0].strip() for s in path.lower().split("/")):
        if segment == ".." and segments:
            segments.pop()
        elif segment not in ("", ".", ".."):
            segments.append(segment)
    return "/" + "/".join(segments)
