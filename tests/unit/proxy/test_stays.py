from __future__ import annotations

from kvproxy.identifiers import Revision
from kvproxy.proxy.stays import new_stay, remember, stay_after
from kvproxy.upstream.replies import Usage
from tests.support.fakes_core import A, World, stay


def test_a_stay_begins_at_the_revision_that_its_session_reached() -> None:
    fresh = new_stay(World().session(A, revision=Revision(7)))
    assert (fresh.session, fresh.revision, fresh.is_dirty, fresh.tokens) == (A, 7, False, 0)


def test_the_last_token_of_an_answer_is_not_in_the_slot() -> None:
    after = stay_after(stay(A, saved=1), Usage(20, 100, 8), 5.0)
    assert (after.tokens, after.revision, after.unsaved_tokens, after.dirty_since) == (127, 2, 38, 5.0)
    assert stay_after(stay(A), Usage(20, 100, 0), 5.0).tokens == 120


def test_an_answer_that_does_not_tell_leaves_the_size_unknown() -> None:
    assert stay_after(stay(A), Usage(None, None), 5.0).tokens is None


def test_a_session_remembers_the_highest_revision_it_reached() -> None:
    session = World().session(A, revision=Revision(3), lost_to_restart=True)
    remember(session, stay(A, revision=5))
    remember(session, stay(A, revision=4))
    remember(session, None)
    assert (session.requests, session.revision) == (3, 5)
    assert (session.was_resident, session.lost_to_restart) == (True, False)
