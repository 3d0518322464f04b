"""One request as kvproxy sees it: what it asks, whose it is, and how far it reaches into the slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from kvproxy.boundary.turn import Asked
from kvproxy.dialects.endpoints import Endpoint, Reach, refine
from kvproxy.dialects.opening import opening_of
from kvproxy.dialects.reading import Reading
from kvproxy.dialects.stamp import without_changes
from kvproxy.frozen import frozen
from kvproxy.proxy.receive import may_hide_several, read_body, understand
from kvproxy.proxy.rewrite import can_splice
from kvproxy.sessions.adapters import adapters_in
from kvproxy.sessions.identity import Identity, Sources, identify, tenant_of
from kvproxy.sessions.key import ClientId, forbids_persistence, is_declared_auxiliary, wants_bypass
from kvproxy.slots.needs import answer_limit


@dataclass(frozen=True, slots=True)
class Terms:
    """How requests are taken in: where ids are looked for, whether a conversation without one is known by
    what it says, whether each API key has conversations of its own, and how large a body may be."""

    sources: Sources
    is_implicit: bool
    has_tenants: bool
    max_bytes: int
    stills_stamp: bool = False
    """Whether a stamp that changes with each request is overwritten, the one rewrite of a prompt there is."""


@frozen
class Call:
    """One request. `reading` is what its body says, None where that cannot be understood."""

    endpoint: Endpoint
    reach: Reach
    body: bytes
    identity: Identity
    is_bypass: bool
    is_auxiliary: bool
    may_persist: bool
    opening: bytes | None = None
    """A digest of how the conversation opens."""
    answer_limit: int | None = None
    """The most tokens that the client asks for; None if it did not say."""
    document: Mapping[str, Any] | None = None
    """The body as it was understood, where it will be needed after the request."""
    reading: Reading | None = field(default=None, repr=False)
    is_recognised: bool = False
    """Whether its conversation is known by what it says, if it does not name one."""
    tenant: str = ""
    """Whose key it came with, where that tells conversations apart."""
    adapters: str = ""
    """The adapters that it asks for itself; empty where the server's own hold."""

    @property
    def asked(self) -> Asked | None:
        """The request as its prompt is made of it, where that will be needed."""
        return None if self.document is None else Asked(self.endpoint.label, self.document)

    @property
    def client(self) -> ClientId | None:
        """What it calls its conversation."""
        return self.identity.client

    @property
    def is_anonymous(self) -> bool:
        """Whether it belongs to no conversation that we could tell."""
        return self.identity.client is None and not self.is_recognised

    @property
    def streams(self) -> bool:
        """Whether the answer is to come as a stream of events."""
        return self.reading is not None and self.reading.is_stream

    @property
    def may_name_slot(self) -> bool:
        """Whether the client names a slot, or says something that only the server can read."""
        return self.reading is None or "id_slot" in self.reading.document

    @property
    def is_owner(self) -> bool:
        """Whether what it computes becomes a session's state."""
        return not (self.is_bypass or self.is_auxiliary or self.is_anonymous)

    def auxiliary(self) -> Call:
        """The same as a side call, which owns nothing, in a slot of our choice where the route has one."""
        may_pin = self.reach is Reach.FLOATING and self.endpoint.reach is Reach.PINNED
        is_pinned = may_pin and self.reading is not None and can_splice(self.body)
        return replace(self, is_auxiliary=True, reach=Reach.PINNED if is_pinned else self.reach)

    def pinned(self) -> Call:
        """The same where the server was seen to obey a pin on a route on which others ignore it. As on any
        route, a request of nobody is left to the server."""
        is_one = self.reach is Reach.FLOATING and can_splice(self.body)
        is_nobodys = self.is_anonymous and not self.is_bypass and not self.is_auxiliary
        return replace(self, reach=Reach.PINNED) if is_one and not is_nobodys else self

    @property
    def may_float(self) -> bool:
        """Whether nobody but us has chosen that it is pinned: it names neither a conversation nor a slot."""
        return self.identity.client is None and self.is_owner and not self.may_name_slot

    def anonymous(self) -> Call:
        """The same as a request of nobody, where the server has to choose the slot."""
        return replace(self, reach=Reach.FLOATING, is_recognised=False)

    def unpinned(self) -> Call:
        """The same where the server has to choose the slot."""
        return replace(self, reach=Reach.FLOATING)


async def receive(
    request: web.BaseRequest,
    endpoint: Endpoint,
    terms: Terms,
    *,
    keeps_document: bool = False,
) -> Call:
    """Read the request. Raises ReplyError (413) for a body over the limit."""
    body = await read_body(request, terms.max_bytes)
    headers = request.headers
    reading = await understand(body, endpoint.label, headers.get("Content-Encoding"))
    if terms.stills_stamp and reading is not None:
        still = without_changes(body, reading.system_text)
        if still is not body:
            body, reading = still, await understand(still, endpoint.label)
    document = None if reading is None else reading.document
    adapters = adapters_in(document)
    hides = document is None and may_hide_several(body, headers)
    is_bypass, is_auxiliary = wants_bypass(headers), is_declared_auxiliary(headers)
    # The client wants nothing reused; then nothing of it is worth keeping as a session's either.
    forbids_cache = document is not None and document.get("cache_prompt") is False
    call = Call(
        endpoint,
        refine(endpoint, document, may_hide_several=hides),
        body,
        identify(headers, document, terms.sources),
        is_bypass,
        is_auxiliary or forbids_cache,
        # The server forgets on a restart by which adapters a slot was computed, and no snapshot tells it.
        not adapters and not forbids_persistence(headers),
        None if adapters else opening_of(reading),
        answer_limit(document),
        document if keeps_document else None,
        reading,
        terms.is_implicit and reading is not None and reading.is_recognisable,
        tenant_of(headers) if terms.has_tenants else "",
        adapters,
    )
    return call.unpinned() if _server_chooses(call, document) else call


def _server_chooses(call: Call, document: Mapping[str, Any] | None) -> bool:
    """A request of nobody in particular finds what it shares with others best by the server's own choice.

    Unless it names a slot itself: sent as it is, it would run there whoever is in it.
    """
    if call.reach is not Reach.PINNED:
        return False
    is_nobodys = call.is_anonymous and not call.is_bypass and not call.is_auxiliary
    names_slot = document is not None and "id_slot" in document
    return (is_nobodys and not names_slot) or not can_splice(call.body)
