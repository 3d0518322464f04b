from __future__ import annotations

from typing import Any

from tests.unit.cli.conftest import Ask, Daemon


def session(**changes: Any) -> dict[str, Any]:
    known = {
        "session": "abc",
        "state": "active_dirty",
        "slot": 1,
        "requests": 3,
        "last": None,
        "snapshots": [],
    }
    return known | changes


def test_each_session_is_a_row_with_its_last_outcome(daemon: Daemon, ask: Ask) -> None:
    last = {"outcome": "cold", "reason": "new-session"}
    kept = [{"generations": [{}, {}]}]
    sessions = [session(last=last, snapshots=kept), session(slot=None)]
    daemon.gives("GET", "/kvproxy/sessions", {"sessions": sessions})
    shown = ask("sessions")
    assert shown.code == 0
    assert shown.rows[1:] == [
        ["abc", "active_dirty", "1", "3", "2", "cold", "new-session"],
        ["abc", "active_dirty", "-", "3", "0", "-", "-"],
    ]


def test_json_is_the_answer_itself(daemon: Daemon, ask: Ask) -> None:
    daemon.gives("GET", "/kvproxy/sessions", {"sessions": [session()]})
    assert ask("sessions", "--json").json == {"sessions": [session()]}
