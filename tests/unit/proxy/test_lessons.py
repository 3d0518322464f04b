from __future__ import annotations

from typing import Any, cast

import pytest

from kvproxy.boundary.continuations import Ending
from kvproxy.boundary.turn import Asked, Turn
from kvproxy.identifiers import Revision
from kvproxy.proxy.lessons import learn
from kvproxy.sessions.session import Session
from kvproxy.slots.slot import Occupancy
from kvproxy.upstream.replies import Usage
from tests.support.fakes_core import A

BEFORE = Occupancy(A, Revision(1), Revision(1), 50)
AFTER = Occupancy(A, Revision(2), Revision(1), 70)
USAGE = Usage(10, 50, 11, "stop")
ASKED = Asked("messages", {})


class Shapes:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def observe(self, session: Session, *seen: object) -> None:
        self.seen.append(seen)

    def remember(self, session: Session, turn: Turn | None) -> None:
        session.turn = turn


@pytest.mark.parametrize("before", [BEFORE, None])
def test_what_an_answer_showed_counts_only_for_a_stay_that_it_met(before: Occupancy | None) -> None:
    shaper = Shapes()
    learn(cast(Any, shaper), Session(A, "", "", 0.0, Revision(1)), None, before, AFTER, USAGE)
    assert shaper.seen == ([] if before is None else [(BEFORE, 60, 50)])


def test_the_turn_is_remembered_where_its_request_was() -> None:
    session = Session(A, "", "", 0.0, Revision(1), asked=Asked("messages", {"a": "newer one"}))
    learn(cast(Any, Shapes()), session, ASKED, None, AFTER, USAGE)
    assert session.turn == Turn(ASKED, Ending.TEXT, 60, AFTER.revision)


def test_an_older_turn_is_forgotten_where_it_was_not() -> None:
    session = Session(A, "", "", 0.0, Revision(1))
    session.turn = Turn(ASKED, Ending.CUT, 1, Revision(0))
    learn(cast(Any, Shapes()), session, None, None, AFTER, USAGE)
    assert session.turn is None
