from __future__ import annotations

import pytest

from scripts import demo_report
from scripts.demo_report import Step
from scripts.demo_talk import Answer


def answer(computed: int, reused: int, seconds: float, status: int = 200, reason: str = "") -> Answer:
    return Answer(status, "words", computed, reused, seconds, "restored", reason)


def step(
    proxied: Answer, direct: Answer | None = None, *, known: int = 1000, restarted: bool = False
) -> Step:
    return Step(6, "goes on", known, proxied, direct or answer(1024, 0, 4.0), restarted)


def test_a_line_tells_both_ways_and_their_ratio() -> None:
    line = demo_report.line(step(answer(24, 1000, 0.5)))
    assert [column.split() for column in line.split("|")] == [
        ["6", "goes", "on"],
        ["restored", "24", "1000", "0.50", "s"],
        ["1024", "0", "4.00", "s"],
        ["8.0", "x", "sooner"],
    ]


def test_a_word_that_came_later_is_said_to_be_later() -> None:
    assert demo_report.ratio(step(answer(24, 1000, 5.0))).split() == ["1.2", "x", "later"]
    assert demo_report.ratio(step(answer(24, 1000, 4.0))).split() == ["1.0", "x", "sooner"]


def test_lines_stand_under_their_columns() -> None:
    columns = demo_report.head().splitlines()[1]
    line = demo_report.line(step(answer(24, 1000, 0.5)))
    assert [n for n, c in enumerate(columns) if c == "|"] == [n for n, c in enumerate(line) if c == "|"]


def test_the_summary_adds_all_tokens_but_only_the_waits_after_a_restart() -> None:
    steps = [
        step(answer(1000, 0, 9.0), answer(1000, 0, 9.0)),
        step(answer(20, 1000, 0.2), answer(1020, 0, 4.0), restarted=True),
        step(answer(20, 1000, 0.4), answer(1020, 0, 6.0), restarted=True),
    ]
    assert demo_report.summary(steps) == (
        "1,040 tokens computed instead of 3,040; time to first token after a restart 0.30 s instead of 5.00 s"
    )


def test_a_step_that_reused_what_was_known_is_right() -> None:
    assert demo_report.fault(step(answer(74, 950, 0.5), known=1000)) is None
    assert demo_report.fault(step(answer(1000, 0, 5.0), known=0)) is None


@pytest.mark.parametrize("reused", [0, 949])
def test_a_step_that_computed_again_what_was_known_is_a_fault(reused: int) -> None:
    fault = demo_report.fault(step(answer(1024 - reused, reused, 5.0, reason="no-snapshot")))
    assert fault is not None
    assert f"step 6 reused {reused} tokens of the 1000" in fault
    assert "no-snapshot" in fault


def test_an_error_is_a_fault_whatever_it_counts() -> None:
    fault = demo_report.fault(step(answer(0, 1000, 0.1, status=503)))
    assert fault == "step 6 was answered with status 503"
