"""Whose a request is: the session that owns what it computes.

The id that a client names says in which scope to look, the content which branch of it the request belongs to.
A request without an id looks among all that have none. Where the content does not tell (an endpoint without
turns), an id alone makes one session, as it stands.

What is known of a branch changes when it is known where the request runs: in the branch's own slot, or, if
that is busy with another request, elsewhere as a branch of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b

from kvproxy.frozen import frozen
from kvproxy.identifiers import ServerName, SessionKey, short
from kvproxy.proxy.call import Call
from kvproxy.sessions.branches import Branch, Branches, KeyOf, Look, Match, Where
from kvproxy.sessions.key import ClientId, derive_key
from kvproxy.sessions.lines import Asked, Cause
from kvproxy.sessions.newcomers import Newcomers
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.sessions.session import Session
from kvproxy.telemetry.events import BranchBegan, Emit, IdsDisagreed, StaticIdSeen

CONTENT = ClientId("content", "")
"""Stands for the id of a conversation that has none."""

SCOPE_BYTES = 16


@frozen
class Owner:
    """The session of a request. `match` is None where its content did not tell."""

    session: Session
    call: Call
    model: str
    match: Match | None = None


class Recogniser:
    """`max_branches` bounds what is kept of one id. `secret` is asked when it is needed: it is read late."""

    def __init__(
        self,
        server: ServerName,
        registry: SessionRegistry,
        branches: Branches,
        emit: Emit,
        *,
        max_branches: int,
        secret: Callable[[], bytes],
    ) -> None:
        self._server = server
        self._registry = registry
        self._branches = branches
        self._emit = emit
        self._max_branches = max_branches
        self._newcomers = Newcomers()
        self._secret = secret

    def look(self, call: Call, model: str) -> Look | None:
        """The request held against the conversations that are known; None if it says too little, or what it
        says does not matter. Good until the next await. `model` is the server's."""
        reading = call.reading
        if call.is_auxiliary or call.is_bypass or reading is None or not reading.is_recognisable:
            return None
        where = self._where(call, _computed_by(model, call))
        return self._branches.look(where, Asked(self._secret(), reading))

    def owner_of(self, call: Call, model: str, look: Look | None) -> Owner | None:
        """None for a request that owns nothing. `look` is that at the request, just now."""
        if not call.is_owner:
            return None
        model = _computed_by(model, call)
        if call.identity.is_disputed:
            self._emit(IdsDisagreed(self._server))
        if look is None:
            key = self._key_of(call, model, "")
            return Owner(self._session(call, model, key, "", None), call, model)
        match = self._branches.match(look, self._keys(call, model))
        branch = match.branch
        if match.cause is not None:
            self._began(call, branch, match.cause)
        session = self._session(call, model, branch.key, branch.name, branch.parent)
        if call.identity.client is None:
            self._judge_newcomer(session, match)
        branch.may_persist = session.may_persist
        return Owner(session, call, model, match)

    def runs_at_home(self, owner: Owner) -> None:
        """The request has its session's slot."""
        if owner.match is not None:
            self._branches.take(owner.match)

    def runs_elsewhere(self, owner: Owner) -> Session | None:
        """The session's slot is busy with another request: whose this one is. None if it owns nothing,
        because it says nothing by which it would be known again."""
        call, match = owner.call, owner.match
        if match is None:
            return None
        branch = self._branches.fork(match, self._keys(call, owner.model))
        branch.may_persist = call.may_persist and owner.session.may_persist
        self._began(call, branch, Cause.FORKED)
        session = self._session(call, owner.model, branch.key, branch.name, branch.parent)
        session.may_persist = branch.may_persist
        session.asked = None  # nothing can be restored for it
        return session

    # -- inside --------------------------------------------------------------------------------------------

    def _session(
        self, call: Call, model: str, key: SessionKey, branch: str, parent: SessionKey | None
    ) -> Session:
        client = call.identity.client
        session = self._registry.touch(key, client.digest if client else "", model)
        session.namespace = client.namespace if client else CONTENT.namespace
        session.branch, session.parent = branch, parent
        session.may_persist = session.may_persist and call.may_persist
        session.opening = call.opening
        session.asked = call.asked
        return session

    def _began(self, call: Call, branch: Branch, cause: Cause) -> None:
        source = "content" if call.identity.client is None else "id"
        key, parent = short(branch.key), branch.parent and short(branch.parent)
        self._emit(BranchBegan(self._server, key, source, cause, parent))
        if source == "id" and self._branches.found_static(branch):
            self._emit(StaticIdSeen(self._server, key))

    def _judge_newcomer(self, session: Session, match: Match) -> None:
        if match.cause is not None:
            session.is_passing = match.cause is Cause.NEW and self._newcomers.began()
        elif len(match.asked.line) > len(match.branch.line):  # else the same was only asked again
            session.is_passing = False
            self._newcomers.went_on()

    def _keys(self, call: Call, model: str) -> KeyOf:
        return lambda name: self._key_of(call, model, name)

    def _key_of(self, call: Call, model: str, name: str) -> SessionKey:
        agent = call.identity.agent
        branch = f"{agent}/{name}" if agent else name
        return derive_key(self._server, call.tenant, model, call.identity.client or CONTENT, branch)

    def _where(self, call: Call, model: str) -> Where:
        identity = call.identity
        client = identity.client
        scope = self._scope(call, model, client or CONTENT, identity.agent)
        if client is None:
            return Where(scope)
        origin = identity.parent
        parent = None if origin is None else self._scope(call, model, origin, identity.parent_agent)
        return Where(scope, parent, self._max_branches)

    def _scope(self, call: Call, model: str, client: ClientId, agent: str) -> bytes:
        parts = (self._server, call.tenant, model, client.namespace, client.value, agent)
        return _scope_of(self._secret(), parts)


@lru_cache(maxsize=1024)
def _scope_of(secret: bytes, parts: tuple[str, ...]) -> bytes:
    """No two parts can run together."""
    hasher = blake2b(key=secret, digest_size=SCOPE_BYTES)
    for part in parts:
        raw = part.encode("utf-8", "surrogateescape")
        hasher.update(len(raw).to_bytes(4, "big") + raw)
    return hasher.digest()


def _computed_by(model: str, call: Call) -> str:
    """With adapters of its own, a model is another one."""
    return f"{model} lora {call.adapters}" if call.adapters else model
