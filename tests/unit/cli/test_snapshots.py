from __future__ import annotations

from typing import Any

from tests.unit.cli.conftest import Ask, Daemon


def generation(**changes: Any) -> dict[str, Any]:
    known = {"name": "n", "tokens": 5, "bytes": 60, "saved_at": 0.0, "valid": True, "invalid_reason": None}
    return known | changes


SNAPSHOTS = [{"session": "abc", "generations": [generation(), generation(valid=False, invalid_reason="bad")]}]


def test_each_generation_is_a_row(daemon: Daemon, ask: Ask) -> None:
    daemon.gives("GET", "/kvproxy/snapshots", {"snapshots": SNAPSHOTS})
    shown = ask("snapshots")
    assert shown.code == 0
    assert shown.rows[1:] == [
        ["abc", "n", "5", "60", "1970-01-01", "00:00:00", "yes", "-"],
        ["abc", "n", "5", "60", "1970-01-01", "00:00:00", "no", "bad"],
    ]


def test_json_is_the_answer_itself(daemon: Daemon, ask: Ask) -> None:
    daemon.gives("GET", "/kvproxy/snapshots", {"snapshots": SNAPSHOTS})
    assert ask("snapshots", "--json").json == {"snapshots": SNAPSHOTS}
