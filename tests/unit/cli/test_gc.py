from __future__ import annotations

from tests.unit.cli.conftest import Ask, Daemon


def test_what_went_is_listed(daemon: Daemon, ask: Ask) -> None:
    daemon.gives("POST", "/kvproxy/gc", {"deleted": ["a", "b"]})
    shown = ask("gc")
    assert (shown.code, shown.out) == (0, "a\nb\n2 snapshots deleted\n")
    assert ask("gc", "--json").json == {"deleted": ["a", "b"]}


def test_a_dry_run_asks_for_one(daemon: Daemon, ask: Ask) -> None:
    daemon.gives("POST", "/kvproxy/gc?dry_run=1", {"deleted": ["a"]})
    assert ask("gc", "--dry-run").out == "a\n1 snapshot would be deleted\n"
    assert [path for _, path, _ in daemon.asked] == ["/kvproxy/gc?dry_run=1"]
