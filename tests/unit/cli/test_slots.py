from __future__ import annotations

from tests.unit.cli.conftest import Ask, Daemon

SLOTS = [
    {"id": 0, "state": "resident", "occupant": "abc", "dirty": True, "tokens": 12, "idle_seconds": 1.5},
    {"id": 1, "state": "idle", "occupant": None, "dirty": False, "tokens": None, "idle_seconds": 9.0},
]


def test_each_slot_is_a_row(daemon: Daemon, ask: Ask) -> None:
    daemon.gives("GET", "/kvproxy/slots", {"slots": SLOTS})
    shown = ask("slots")
    assert shown.code == 0
    assert shown.rows[1:] == [
        ["0", "resident", "abc", "yes", "12", "1.5"],
        ["1", "idle", "-", "no", "-", "9.0"],
    ]


def test_json_is_the_answer_itself(daemon: Daemon, ask: Ask) -> None:
    daemon.gives("GET", "/kvproxy/slots", {"slots": SLOTS})
    assert ask("slots", "--json").json == {"slots": SLOTS}
