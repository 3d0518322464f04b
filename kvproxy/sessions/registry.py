"""All conversations we know, bounded: a record is only what we remember, never what a client needs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvproxy.clock import Clock
from kvproxy.identifiers import SHORT_KEY_DIGITS, Revision, SessionKey
from kvproxy.sessions.key import digest_of
from kvproxy.sessions.session import Session

MAX_SESSIONS = 10_000
"""About 5 MB of records; the least recently seen are forgotten first."""


class SessionRegistry:
    """`on_forget` is called with the key of a session of which nothing is to be known any more."""

    def __init__(
        self,
        clock: Clock,
        *,
        max_sessions: int = MAX_SESSIONS,
        on_forget: Callable[[SessionKey], None] = lambda key: None,
    ) -> None:
        self._clock = clock
        self._on_forget = on_forget
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()

    def touch(self, key: SessionKey, client_digest: str, model: str) -> Session:
        """The session's record, made if it is new, as the one seen last."""
        session = self._sessions.get(key)
        if session is None:
            session = self.adopt(key, client_digest, model, self._clock.wall(), Revision(0))
        self._sessions.move_to_end(key)
        session.last_seen = self._clock.wall()
        return session

    def adopt(
        self, key: SessionKey, client_digest: str, model: str, last_seen: float, revision: Revision
    ) -> Session:
        """A session known from its manifest, or new."""
        session = self._sessions[key] = Session(key, client_digest, model, last_seen, revision)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return session

    def find(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def named(self, name: str) -> tuple[Session, ...]:
        """The sessions an operator means: by the client's own id, the short key, or the whole key."""
        digest = digest_of(name)
        return tuple(
            session
            for session in self._sessions.values()
            if session.client_digest == digest or name in (session.key, session.key[:SHORT_KEY_DIGITS])
        )

    def forget(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)
        self._on_forget(key)

    def lost(self, keys: Iterable[SessionKey]) -> None:
        """The server's life ended with these in its slots."""
        for key in keys:
            if (session := self._sessions.get(key)) is not None:
                session.lost_to_restart = True

    def all(self) -> tuple[Session, ...]:
        return tuple(self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)
