from __future__ import annotations

from pathlib import Path

import pytest

from scripts import console, demo
from scripts.demo_processes import Service
from scripts.demo_talk import JOURNAL, Answer

KVPROXY, DIRECT = 1, 2


class Answers:
    """What listens on the two ports, without anything listening."""

    def __init__(self) -> None:
        self.given = {KVPROXY: [(1000, 0)], DIRECT: [(1000, 0)]}

    def __call__(self, port: int, session: str, messages: object) -> Answer:
        computed, reused = self.given[port].pop(0)
        return Answer(200, "words", computed, reused, 1.0, "cold", "no-snapshot")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers()
    monkeypatch.setattr(demo, "ask", answers)
    return answers


@pytest.fixture
def played(tmp_path: Path) -> demo.Demo:
    log = tmp_path / "log"
    log.write_text("the reason is here")
    services = [Service("one", [], port=port, path="/", log=log) for port in (0, KVPROXY, DIRECT)]
    return demo.Demo(*services)


def test_a_prompt_computed_twice_ends_the_demo_with_kvproxys_last_lines(
    played: demo.Demo, answers: Answers
) -> None:
    answers.given = {KVPROXY: [(1000, 0), (1040, 0)], DIRECT: [(1000, 0), (1040, 0)]}
    played.ask("first", JOURNAL)
    with pytest.raises(console.Trouble, match="step 2 reused 0 tokens of the 1000") as caught:
        played.ask("second", JOURNAL)
    assert "the reason is here" in caught.value.mend


def test_what_is_computed_directly_is_shown_and_no_fault(
    played: demo.Demo, answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.given = {KVPROXY: [(1000, 0), (40, 1000)], DIRECT: [(1000, 0), (1040, 0)]}
    played.ask("first", JOURNAL)
    played.ask("second", JOURNAL)
    assert [step.known for step in played.steps] == [0, 1000]
    assert "second" in capsys.readouterr().out


def test_a_server_that_breaks_off_is_trouble(
    played: demo.Demo, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Answer:
        raise ConnectionResetError

    monkeypatch.setattr(demo, "ask", broken)
    with pytest.raises(console.Trouble, match="one broke off"):
        played.ask("first", JOURNAL)
