"""Which header fields pass, in which direction, and the few that a gateway adds.

Fields keep their order, their number and their bytes. What ends at each hop is dropped (RFC 9110 7.6.1),
but no `Connection` token can take away a field that says who is asking or how long the message is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import ip_address

from multidict import CIMultiDict

from kvproxy.errors import ErrorCode, ReplyError

RawHeaders = Iterable[tuple[bytes, bytes]]

OWN_PREFIX = "x-kvproxy-"
VIA = "1.1 kvproxy"
_OWN_NAME = VIA.partition(" ")[2]
_LOOP_DETECTED = 508
_PASSES_ALLOWED = 1
"""One kvproxy behind another is a choice; meeting one's own name twice is a loop."""

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_PROTECTED = frozenset(
    {
        "authorization",
        "content-encoding",
        "content-length",
        "content-type",
        "cookie",
        "forwarded",
        "host",
        "set-cookie",
        "via",
        "x-api-key",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
    }
)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_KEYS = frozenset({"authorization", "x-api-key"})
_FORWARDED = ("X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host")


def upstream_headers(
    raw: RawHeaders,
    *,
    peer: str | None,
    scheme: str,
    host: str | None,
    api_key: str | None = None,
    is_peer_trusted: bool = False,
) -> CIMultiDict[str]:
    """The fields to send upstream, without `Host`, which the connection gives.

    `peer` is the client's address, `host` what it asked for. An untrusted peer's `X-Forwarded-*` are not
    passed on. `api_key` replaces whatever key the client sent. Raises ReplyError (508) for a loop.
    """
    fields = list(_end_to_end(raw))
    _refuse_loop(fields)
    known = CIMultiDict(fields if is_peer_trusted else ())
    kept = (f for f in fields if not _stays_here(f[0].lower(), api_key))
    headers: CIMultiDict[str] = CIMultiDict(kept)
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    headers.add("Via", VIA)
    for name, value in _forwarded(known, peer, scheme, host):
        headers.add(name, value)
    return headers


def client_headers(raw: RawHeaders) -> CIMultiDict[str]:
    """The upstream's fields as the client gets them. Adds none."""
    pairs = list(raw)
    is_chunked = any(name.lower() == b"transfer-encoding" for name, _ in pairs)
    fields = _end_to_end(pairs)
    if is_chunked:  # a length beside chunks is either wrong or an attack (RFC 9112 6.3)
        fields = (f for f in fields if f[0].lower() != "content-length")
    return CIMultiDict(fields)


def _stays_here(name: str, api_key: str | None) -> bool:
    """`Expect` is answered by us; one more of ours upstream would wait for a second 100."""
    if name in ("host", "expect") or name.startswith((OWN_PREFIX, "x-forwarded-")):
        return True
    return api_key is not None and name in _KEYS


def _end_to_end(raw: RawHeaders) -> Iterator[tuple[str, str]]:
    pairs = [(name.decode("ascii", "replace"), value) for name, value in raw]
    named = {token for name, value in pairs if name.lower() == "connection" for token in _tokens(value)}
    dropped = _HOP_BY_HOP | (named - _PROTECTED)
    for name, value in pairs:
        text = _text(value)
        if text is not None and name.lower() not in dropped:
            yield name, text


def _text(value: bytes) -> str | None:
    """None for what the HTTP library would refuse or write differently: better no field than another one."""
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if _CONTROL.search(text) else text


def _tokens(value: bytes) -> Iterator[str]:
    for token in value.decode("latin-1").split(","):
        yield token.strip().lower()


def _refuse_loop(fields: list[tuple[str, str]]) -> None:
    hops = [hop.split() for name, value in fields if name.lower() == "via" for hop in value.split(",")]
    passes = sum(1 for hop in hops if len(hop) > 1 and hop[1].lower() == _OWN_NAME)
    if passes > _PASSES_ALLOWED:
        message = "the request came back to kvproxy: its upstream points at kvproxy itself"
        raise ReplyError(ErrorCode.BACKEND_UNAVAILABLE, message, status=_LOOP_DETECTED)


def _forwarded(
    known: CIMultiDict[str], peer: str | None, scheme: str, host: str | None
) -> Iterator[tuple[str, str]]:
    """For, proto and host. A malformed chain is not continued: some servers crash on one."""
    chain = [hop.strip() for hop in ",".join(known.getall("x-forwarded-for", [])).split(",")]
    before = chain if all(_is_address(hop) for hop in chain) else []
    if peer is not None and _is_address(peer):
        yield _FORWARDED[0], ", ".join([*before, peer])
    yield _FORWARDED[1], known.get("x-forwarded-proto", scheme)
    if (asked := known.get("x-forwarded-host", host)) is not None:
        yield _FORWARDED[2], asked


@lru_cache(maxsize=1024)
def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
