from __future__ import annotations

from tests.unit.cli.conftest import Ask, Daemon


def test_it_says_how_many_were_marked(daemon: Daemon, ask: Ask) -> None:
    daemon.gives("POST", "/kvproxy/sessions/s/invalidate", {"invalidated": 2})
    shown = ask("invalidate", "s")
    assert (shown.code, shown.out) == (0, "2 snapshots will not be restored\n")
    assert ask("invalidate", "s", "--json").json == {"invalidated": 2}
