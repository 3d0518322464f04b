from __future__ import annotations

import pytest

from kvproxy.cli.flush import WHY
from tests.unit.cli.conftest import Ask, Daemon


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 1)])
def test_a_flush_that_left_something_unsaved_has_failed(
    daemon: Daemon, ask: Ask, failed: int, code: int
) -> None:
    daemon.gives("POST", "/kvproxy/flush", {"saved": 3, "failed": failed})
    shown = ask("flush")
    assert (shown.code, shown.out) == (code, f"3 saved, {failed} failed\n")
    assert shown.err == ("" if not failed else f"kvproxy flush: {WHY}\n")
    assert ask("flush", "--json").json == {"saved": 3, "failed": failed}
