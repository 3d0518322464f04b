from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from kvproxy.cli import doctor, main
from kvproxy.doctor.check import Change, Report, degraded, passed
from kvproxy.settings.model import Settings

REPORT = Report((passed("reachable", "yes"), degraded("save path", "none", Change("a flag", "a reason"))))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The URL and whether the probe was wanted, each time an examination was asked for."""
    calls = []

    async def examine(settings: Settings, *, wants_probe: bool) -> Report:
        calls.append((settings.upstreams[0].url, wants_probe))
        return REPORT

    monkeypatch.setattr(doctor, "examine", examine)
    return calls


def test_a_table_a_verdict_and_what_to_change(
    asked: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--upstream", "http://gpu:1"]) == 1
    assert capsys.readouterr().out == (
        "CHECK      RESULT    DETAIL\n"
        "reachable  ok        yes\n"
        "save path  degraded  none\n"
        "\n"
        "degraded: save path: none\n"
        "change  a flag\n"
        "        a reason\n"
    )
    assert asked == [("http://gpu:1", True)]


def test_as_json_it_says_the_same(asked: list[tuple[str, bool]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-probe"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "readiness": "degraded",
        "exit_code": 1,
        "verdict": "degraded: save path: none",
        "proven": False,
        "checks": [
            {"name": "reachable", "result": "ok", "detail": "yes"},
            {"name": "save path", "result": "degraded", "detail": "none"},
        ],
        "changes": [{"change": "a flag", "reason": "a reason"}],
    }
    assert [wants_probe for _, wants_probe in asked] == [False]


def test_where_nothing_listens_it_ends_with_2_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    where = ["--upstream", f"http://127.0.0.1:{port}", "--state-dir", str(tmp_path)]
    assert main(["doctor", *where]) == 2
    shown = capsys.readouterr()
    assert "unusable: reachable: " in shown.out
    assert shown.err == ""


def test_bad_settings_end_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--upstream", "gpu"]) == 2
    assert capsys.readouterr().err.startswith("kvproxy doctor: upstreams.0.url")


def test_the_help_says_that_it_wants_an_idle_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "idle" in capsys.readouterr().out
