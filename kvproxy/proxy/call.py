"""One request as kvproxy sees it: what it asks, whose it is, and how far it reaches into the slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from kvproxy.dialects.endpoints import Endpoint, Reach, refine
from kvproxy.dialects.opening import opening_of
from kvproxy.dialects.reading import Reading, read
from kvproxy.proxy.receive import parse_object, read_body
from kvproxy.proxy.rewrite import can_splice
from kvproxy.sessions.key import (
    ClientId,
    forbids_persistence,
    is_declared_auxiliary,
    read_client_id,
    wants_bypass,
)


@dataclass(frozen=True, slots=True)
class Call:
    """`client` is None where the request names no conversation, or owns nothing of the one it names."""

    endpoint: Endpoint
    reach: Reach
    body: bytes
    client: ClientId | None
    is_bypass: bool
    is_auxiliary: bool
    may_persist: bool
    opening: bytes | None = None
    """A digest of how the conversation opens."""
    document: Mapping[str, Any] | None = None
    """The body as it was understood, where somebody will need it."""
    reading: Reading | None = field(default=None, repr=False)
    """What the body says, None where that cannot be understood."""
    streams: bool = False
    """Whether the answer is to come as a stream of events."""
    may_name_slot: bool = False
    """Whether the client names a slot, or says something that only the server can read."""

    @property
    def is_owner(self) -> bool:
        """Whether what it computes becomes a session's state."""
        return self.client is not None and not self.is_bypass and not self.is_auxiliary

    def auxiliary(self) -> Call:
        """The same as a side call, which owns nothing, in a slot of our choice where the route has one."""
        may_pin = self.reach is Reach.FLOATING and self.endpoint.reach is Reach.PINNED
        is_pinned = may_pin and self.reading is not None and can_splice(self.body)
        return replace(self, is_auxiliary=True, reach=Reach.PINNED if is_pinned else self.reach)

    def pinned(self) -> Call:
        """The same where the server was seen to obey a pin on a route on which others ignore it. As on any
        route, a request of nobody is left to the server."""
        is_one = self.reach is Reach.FLOATING and can_splice(self.body)
        is_nobodys = self.client is None and not self.is_bypass and not self.is_auxiliary
        return replace(self, reach=Reach.PINNED) if is_one and not is_nobodys else self

    def unpinned(self) -> Call:
        """The same where the server has to choose the slot."""
        return replace(self, reach=Reach.FLOATING)


async def receive(
    request: web.BaseRequest,
    endpoint: Endpoint,
    header_names: tuple[str, ...],
    max_bytes: int,
    *,
    keeps_document: bool = False,
) -> Call:
    """Read the request. Raises ReplyError (413) for a body over `max_bytes`."""
    body = await read_body(request, max_bytes)
    document = await parse_object(body, request.headers.get("Content-Encoding"))
    headers = request.headers
    client = read_client_id(headers, header_names)
    is_bypass, is_auxiliary = wants_bypass(headers), is_declared_auxiliary(headers)
    # The client wants nothing reused; then nothing of it is worth keeping as a session's either.
    forbids_cache = document is not None and document.get("cache_prompt") is False
    call = Call(
        endpoint,
        refine(endpoint, document),
        body,
        client,
        is_bypass,
        is_auxiliary or forbids_cache,
        not forbids_persistence(headers),
        opening_of(document),
        document if keeps_document else None,
        None if document is None else read(endpoint.label, document),
        document is not None and document.get("stream") is True,
        document is None or "id_slot" in document,
    )
    return call.unpinned() if _server_chooses(call, document) else call


def _server_chooses(call: Call, document: Mapping[str, Any] | None) -> bool:
    """A request of nobody in particular finds what it shares with others best by the server's own choice.

    Unless it names a slot itself: sent as it is, it would run there whoever is in it.
    """
    is_anonymous = call.client is None and not call.is_bypass and not call.is_auxiliary
    names_slot = document is not None and "id_slot" in document
    if call.reach is not Reach.PINNED:
        return False
    return (is_anonymous and not names_slot) or not can_splice(call.body)
