from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvproxy.cli import main


def test_it_prints_settings_that_can_be_loaded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-config", "--listen", "[::1]:9", "--state-dir", str(tmp_path)]) == 0
    first = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(first)
    assert main(["check-config", "-c", str(tmp_path / "again.yaml")]) == 0
    assert capsys.readouterr().out == first
    assert yaml.safe_load(first)["server"]["listen"] == "[::1]:9"


def test_it_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--set", "admin.token=hunter2", "--set", "upstreams.0.api_key=hunter2"]) == 0
    assert "hunter2" not in "".join(capsys.readouterr())


def test_settings_that_cannot_be_used_end_with_2_and_a_line_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check-config", "--listen", "x", "--set", "queue.max_waiting=-1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.split(": ")[1:3] for line in shown.err.splitlines()] == [
        ["server.listen", "x"],
        ["queue.max_waiting", "-1"],
    ]
