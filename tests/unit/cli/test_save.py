from __future__ import annotations

import pytest

from tests.unit.cli.conftest import Ask, Daemon

PATH = "/kvproxy/sessions/my%20chat/save"


@pytest.mark.parametrize(
    ("outcome", "code", "told"),
    [
        ("published", 0, "saved: 7 tokens, 80 bytes"),
        ("clean", 0, "nothing to save"),
        ("busy", 1, "not saved: busy: why"),
        ("breaker_open", 1, "not saved: breaker open: why"),
    ],
)
def test_how_a_save_ended_is_a_line_and_an_exit_code(
    daemon: Daemon, ask: Ask, outcome: str, code: int, told: str
) -> None:
    save = {"outcome": outcome, "tokens": 7, "size_bytes": 80, "detail": "why"}
    daemon.gives("POST", PATH, {"saves": [save]})
    shown = ask("save", "my chat")
    assert shown.code == code
    assert shown.out.startswith(told)


def test_one_branch_left_unsaved_makes_it_a_failure(daemon: Daemon, ask: Ask) -> None:
    saves = [{"outcome": end, "tokens": 7, "size_bytes": 80, "detail": ""} for end in ("clean", "busy")]
    daemon.gives("POST", PATH, {"saves": saves})
    assert ask("save", "my chat").code == 1


def test_without_a_session_it_is_wrong_usage(ask: Ask) -> None:
    assert ask("save").code == 2


def test_json_is_the_answer_itself(daemon: Daemon, ask: Ask) -> None:
    answer = {"saves": [{"outcome": "clean", "tokens": 0, "size_bytes": 0, "detail": ""}]}
    daemon.gives("POST", PATH, answer)
    assert ask("save", "my chat", "--json").json == answer
