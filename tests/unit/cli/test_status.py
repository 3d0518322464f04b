from __future__ import annotations

from typing import Any

from kvproxy.cli.status import status_text
from tests.unit.cli.conftest import Ask, Daemon
from tests.unit.cli.test_slots import SLOTS


def status(**server: Any) -> dict[str, Any]:
    stats = dict.fromkeys(("resident", "restored", "seeded", "cold", "restores", "ineffective_restores"), 4)
    stats |= {"requests": 15, "auxiliary": 2, "bypass": 1}
    stats |= {"restore_failures": 1, "saves": 6, "save_failures": 2}
    known = {"name": "main", "url": "http://u", "state": "healthy", "reason": "", "build": "b1", "model": "m"}
    known |= {
        "persistence": {"mode": "plain", "reason": ""},
        "memory": {"kind": "hybrid"},
        "canary": None,
        "breaker": "closed",
        "slots": SLOTS,
        "waiting": 3,
    }
    return {
        "version": "9",
        "uptime_seconds": 61.0,
        "draining": False,
        "servers": [known | server],
        "snapshots": {"valid": 2, "invalid": 1, "bytes": 3_000},
        "stats": {**stats, "prompt_tokens_computed": 25, "prompt_tokens_reused": 75},
    }


def test_it_shows_the_server_its_slots_and_what_was_saved(daemon: Daemon, ask: Ask) -> None:
    daemon.gives("GET", "/kvproxy/status", status())
    shown = ask("status")
    assert shown.code == 0
    for part in (
        "kvproxy 9, up 1 min 1 s\n",
        "server main at http://u: healthy\n",
        "persistence plain\n",
        "memory hybrid, canary not known\n",
        "breaker closed\n",
        "3 requests waiting for a slot",
        "15: 4 resident, 4 restored, 4 cold, 2 auxiliary, 1 bypass\n",
        "75 tokens reused (75.0%), 25 computed",
        "2 valid, 1 invalid, 3.0 kB",
    ):
        assert part in shown.out
    assert ["0", "resident", "abc", "yes", "12", "1.5"] in shown.rows


def test_why_a_server_is_degraded_stands_beside_it() -> None:
    text = status_text(
        status(state="degraded", reason="no path", persistence={"mode": "off", "reason": "flag"})
    )
    assert "degraded (no path)" in text
    assert "persistence off (flag)" in text


def test_saves_that_found_no_room_are_told_where_there_were_any() -> None:
    assert "without room" not in status_text(status())
    full = status()
    full["stats"]["saves_without_room"] = 7
    assert "saves     6, 2 failed, 7 not begun without room on the disk\n" in status_text(full)


def test_one_of_a_thing_is_told_in_the_singular() -> None:
    assert "1 request waiting" in status_text(status(waiting=1))


def test_a_daemon_that_shuts_down_says_so() -> None:
    assert "shutting down" in status_text(status() | {"draining": True})


def test_before_the_first_prompt_there_is_no_share() -> None:
    fresh = status()
    fresh["stats"] |= {"prompt_tokens_computed": 0, "prompt_tokens_reused": 0}
    assert "0 tokens reused, 0 computed" in status_text(fresh)


def test_json_is_the_answer_itself(daemon: Daemon, ask: Ask) -> None:
    daemon.gives("GET", "/kvproxy/status", status())
    assert ask("status", "--json").json == status()
