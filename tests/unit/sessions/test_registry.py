from __future__ import annotations

from kvproxy.identifiers import SHORT_KEY_DIGITS, Revision, SessionKey
from kvproxy.sessions.key import digest_of
from kvproxy.sessions.registry import SessionRegistry
from tests.support.clock import FakeClock
from tests.support.fakes_core import A, B, C


def registry(clock: FakeClock | None = None, *, max_sessions: int = 10) -> SessionRegistry:
    return SessionRegistry(clock or FakeClock(), max_sessions=max_sessions)


def test_a_session_is_made_when_it_is_first_seen_and_kept() -> None:
    clock = FakeClock()
    known = registry(clock)
    first = known.touch(A, "digest", "model")
    clock.advance(5)

    assert known.touch(A, "digest", "model") is first is known.find(A)
    assert (first.revision, first.requests, first.last_seen) == (0, 0, 1005.0)


def test_a_session_from_a_manifest_brings_its_revision_and_its_age() -> None:
    session = registry().adopt(A, "digest", "model", 7.0, Revision(12))
    assert (session.revision, session.last_seen) == (12, 7.0)


def test_an_unknown_session_is_none_and_forgetting_it_is_harmless() -> None:
    known = registry()
    known.forget(A)
    assert known.find(A) is None


def test_a_forgotten_session_begins_anew() -> None:
    known = registry()
    known.touch(A, "digest", "model").requests = 3
    known.forget(A)
    assert known.touch(A, "digest", "model").requests == 0


def test_beyond_the_bound_the_least_recently_seen_is_forgotten() -> None:
    known = registry(max_sessions=2)
    known.touch(A, "", "")
    known.touch(B, "", "")
    known.touch(A, "", "")
    known.touch(C, "", "")

    assert [session.key for session in known.all()] == [A, C]
    assert len(known) == 2


def test_a_session_is_found_by_the_clients_id_the_short_key_or_the_whole_key() -> None:
    known = registry()
    one = known.touch(A, digest_of("chat-1"), "model")
    known.touch(B, digest_of("chat-2"), "model")

    assert known.named("chat-1") == (one,)
    assert known.named(A) == (one,)
    assert known.named(A[:SHORT_KEY_DIGITS]) == (one,)
    assert known.named(A[:5]) == ()


def test_one_clients_id_may_name_several_sessions() -> None:
    known = registry()
    known.touch(A, digest_of("chat"), "model one")
    known.touch(B, digest_of("chat"), "model two")
    assert {session.key for session in known.named("chat")} == {A, B}


def test_those_that_lived_in_slots_of_a_life_that_ended_are_marked() -> None:
    known = registry()
    lost, other = known.touch(A, "", ""), known.touch(B, "", "")

    known.lost([A, SessionKey("f" * 32)])

    assert (lost.lost_to_restart, other.lost_to_restart) == (True, False)
