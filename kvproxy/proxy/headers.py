"""Which header fields pass, in which direction, and the few that a gateway adds.

Fields keep their order, their number and their bytes. What ends at each hop is dropped (RFC 9110 7.6.1),
but no `Connection` token can take away a field that says who is asking or how long the message is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

from multidict import CIMultiDict

from kvproxy.errors import ErrorCode, ReplyError

RawHeaders = Sequence[tuple[bytes, bytes]]

OWN_PREFIX = "x-kvproxy-"
VIA = "1.1 kvproxy"
_VIA_FIELD = b"Via", VIA.encode()
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
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_KEYS = frozenset({"authorization", "x-api-key"})
_GATEWAYS = "x-forwarded-"


@dataclass(frozen=True, slots=True)
class _Name:
    """A field's name, and what it alone decides."""

    text: str
    lower: str
    ends_here: bool
    """At each hop, in either direction."""
    stays_here: bool
    """Of a request: the connection gives it, we answer it, it is meant for us, or we say it anew."""
    is_key: bool
    is_chained: bool
    """Each hop adds to what the one before it said."""
    can_be_named: bool
    """Whether a `Connection` token makes it end here."""


@lru_cache(maxsize=1024)
def _name_of(raw: bytes) -> _Name:
    """Looked up once per name: clients send the same few, and the same ten with each request."""
    text = raw.decode("ascii", "replace")
    lower = text.lower()
    # `Expect` is answered by us; one more of ours upstream would wait for a second 100.
    stays = lower in ("host", "expect") or lower.startswith((OWN_PREFIX, _GATEWAYS))
    return _Name(
        text,
        lower,
        lower in _HOP_BY_HOP,
        stays,
        lower in _KEYS,
        lower == "via" or lower.startswith(_GATEWAYS),
        lower not in _PROTECTED,
    )


def upstream_headers(
    raw: RawHeaders,
    *,
    peer: str | None,
    scheme: str,
    host: str | None,
    api_key: str | None = None,
    is_peer_trusted: bool = False,
) -> list[tuple[bytes, bytes]]:
    """The fields to send upstream, without `Host`, which the connection gives.

    `peer` is the client's address, `host` what it asked for. An untrusted peer's `X-Forwarded-*` are not
    passed on. `api_key` replaces whatever key the client sent. Raises ReplyError (508) for a loop.
    """
    fields = []
    known: dict[str, list[bytes]] = {}
    for name, pair in _end_to_end(raw):
        if not name.stays_here and (api_key is None or not name.is_key):
            fields.append(pair)
        if name.is_chained and (is_peer_trusted or name.lower == "via"):
            known.setdefault(name.lower, []).append(pair[1])
    if "via" in known:
        _refuse_loop(known["via"])
    if api_key is not None:
        fields.append((b"Authorization", f"Bearer {api_key}".encode()))
    fields.append(_VIA_FIELD)
    if len(known) > ("via" in known):
        fields.extend(_continued(known, peer, scheme, host))
    else:
        fields.extend(_introduced(peer, scheme, host))
    return fields


def client_headers(raw: RawHeaders) -> CIMultiDict[str]:
    """The upstream's fields as the client gets them. Adds none."""
    headers: CIMultiDict[str] = CIMultiDict()
    for name, (_, value) in _end_to_end(raw):
        try:
            headers.add(name.text, value.decode())
        except UnicodeDecodeError:
            # The HTTP library would write it differently: better no field than another one.
            continue
    if "Content-Length" in headers and _is_chunked(raw):
        headers.popall("Content-Length")
    return headers


def _is_chunked(raw: RawHeaders) -> bool:
    """A length beside chunks is either wrong or an attack (RFC 9112 6.3)."""
    for field, _ in raw:
        if _name_of(field).lower == "transfer-encoding":
            return True
    return False


def _end_to_end(raw: RawHeaders) -> list[tuple[_Name, tuple[bytes, bytes]]]:
    """The fields that do not end at this hop. A value with control characters no server should see."""
    pairs, named = [], set[str]()
    for pair in raw:
        name = _name_of(pair[0])
        if name.lower == "connection":
            named.update(_tokens(pair[1]))
        elif not name.ends_here and _CONTROL.search(pair[1]) is None:
            pairs.append((name, pair))
    if not named:
        return pairs
    return [(name, pair) for name, pair in pairs if not (name.can_be_named and name.lower in named)]


@lru_cache(maxsize=256)
def _tokens(value: bytes) -> tuple[str, ...]:
    return tuple(token.strip().lower() for token in value.decode("latin-1").split(","))


def _refuse_loop(vias: list[bytes]) -> None:
    hops = [hop.split() for value in vias for hop in value.decode("latin-1").split(",")]
    passes = sum(1 for hop in hops if len(hop) > 1 and hop[1].lower() == _OWN_NAME)
    if passes > _PASSES_ALLOWED:
        message = "the request came back to kvproxy: let upstreams[].url name llama-server, not kvproxy"
        raise ReplyError(ErrorCode.BACKEND_UNAVAILABLE, message, status=_LOOP_DETECTED)


@lru_cache(maxsize=256)
def _introduced(peer: str | None, scheme: str, host: str | None) -> tuple[tuple[bytes, bytes], ...]:
    """For, proto and host of a client that nobody stands in front of."""
    return tuple(_continued({}, peer, scheme, host))


def _continued(
    known: Mapping[str, list[bytes]], peer: str | None, scheme: str, host: str | None
) -> Iterator[tuple[bytes, bytes]]:
    """For, proto and host. A malformed chain is not continued: some servers crash on one."""
    text = b",".join(known.get("x-forwarded-for", [])).decode("latin-1")
    chain = [hop.strip() for hop in text.split(",")]
    before = chain if all(_is_address(hop) for hop in chain) else []
    if peer is not None and _is_address(peer):
        yield b"X-Forwarded-For", ", ".join([*before, peer]).encode()
    yield b"X-Forwarded-Proto", known.get("x-forwarded-proto", [scheme.encode()])[0]
    said = known.get("x-forwarded-host")
    if said is not None:
        yield b"X-Forwarded-Host", said[0]
    elif host is not None:
        yield b"X-Forwarded-Host", host.encode("utf-8", "surrogateescape")


@lru_cache(maxsize=1024)
def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
