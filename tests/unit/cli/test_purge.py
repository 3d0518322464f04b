from __future__ import annotations

from tests.unit.cli.conftest import Ask, Daemon


def test_it_says_what_is_gone(daemon: Daemon, ask: Ask) -> None:
    answer = {"purged": 1, "deleted": ["a", "b"]}
    daemon.gives("DELETE", "/kvproxy/sessions/s", answer)
    shown = ask("purge", "s")
    assert (shown.code, shown.out) == (0, "1 conversation and 2 snapshots forgotten\n")
    assert ask("purge", "s", "--json").json == answer
