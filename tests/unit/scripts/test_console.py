from __future__ import annotations

import io

import pytest

from scripts import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_log_is_a_line_every_five_percent() -> None:
    log = io.StringIO()
    progress = console.Progress("compiling", log)
    for step in range(1, 201):
        progress.update(step, 200)
    lines = log.getvalue().splitlines()
    assert lines[:2] == ["compiling:   0 % (1 of 200)", "compiling:   5 % (10 of 200)"]
    assert lines[-1] == "compiling: 100 % (200 of 200)"
    assert len(lines) == 21


def test_progress_that_falls_back_because_the_job_grew_is_not_shown() -> None:
    log = io.StringIO()
    progress = console.Progress("compiling", log)
    for done, total in [(1, 2), (2, 8), (6, 8)]:
        progress.update(done, total)
    assert log.getvalue().splitlines() == ["compiling:  50 % (1 of 2)", "compiling:  75 % (6 of 8)"]


def test_progress_on_a_terminal_rewrites_one_line() -> None:
    terminal = Terminal()
    progress = console.Progress("compiling", terminal)
    for step in range(1, 5):
        progress.update(step, 4)
    assert terminal.getvalue().count("\r") == 4
    assert terminal.getvalue().count("\n") == 1


def test_trouble_is_told_with_its_mend_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise console.Trouble("no cmake", "install cmake")

    assert console.run(main) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: no cmake\n  mend: install cmake\n"
    assert captured.out == ""


def test_a_main_that_returns_succeeds() -> None:
    assert console.run(lambda: None) == 0
