from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvproxy.cli import main
from kvproxy.slotfile.window import open_window
from tests.unit.slotfile import samples


def inspect(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[dict[str, Any]]]:
    code = main(["inspect", "--json", *map(str, paths)])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def window(tmp_path: Path) -> Path:
    path = tmp_path / "window"
    path.write_bytes(samples.WINDOW_IN_STREAMS)
    return path


def test_everything_a_file_tells_is_shown(window: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (found,) = inspect(capsys, window)
    whole, newest = found.pop("blocks")
    assert code == 0
    assert found == {
        "file": str(window),
        "understood": True,
        "format": "4-packed",
        "memory": "sliding-window",
        "tokens": 20,
        "bytes": len(samples.WINDOW_IN_STREAMS),
        "media_chunks": 0,
        "window": 8,
        "streams": 3,
        "m_rope_cells": False,
        "window_edit": "possible",
        "prefix_cut": "other-memory",
    }
    assert (whole["cells"], whole["layers"], whole["positions"], whole["stream"]) == (20, 2, [0, 19], 1)
    assert (newest["cells"], newest["layers"], newest["positions"]) == (8, 1, [12, 19])
    assert (whole["key_type"], whole["value_type"], whole["values_transposed"]) == ("f16", "f16", False)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("FULL", {"memory": "full", "window_edit": "no-window", "prefix_cut": "possible"}),
        ("FULL_EXTENDED", {"media_chunks": 1, "m_rope_cells": True, "prefix_cut": "media"}),
        ("HYBRID", {"memory": "hybrid", "prefix_cut": "other-memory"}),
        ("RECURRENT", {"memory": "recurrent", "streams": None}),
        ("KEY_INDEX", {"memory": "unknown"}),
        ("WINDOW_NOT_FILLED", {"window": None, "window_edit": "no-window"}),
    ],
)
def test_each_kind_of_memory_is_told(
    name: str, told: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(getattr(samples, name))
    code, (found,) = inspect(capsys, path)
    assert code == 0
    assert {key: found[key] for key in told} == told


def test_a_window_that_was_opened_is_seen_to_be(window: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert open_window(window, window.with_name("open"), 8) is None
    _, (found,) = inspect(capsys, window.with_name("open"))
    assert found["window_edit"] == "open"


def test_a_file_that_is_not_understood_says_why_and_fails(
    window: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = tmp_path / "newer"
    newer.write_bytes(samples.slot_file(3, version=3))
    code, (good, bad, absent) = inspect(capsys, window, newer, tmp_path / "absent")
    assert code == 1
    assert good["understood"]
    assert bad == {
        "file": str(newer),
        "understood": False,
        "reason": "other-format",
        "version": 3,
        "tokens": 3,
    }
    assert absent == {
        "file": str(tmp_path / "absent"),
        "understood": False,
        "reason": "unreadable",
        "detail": "No such file or directory",
    }


def test_people_get_columns(window: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(window)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["memory", "sliding-window"] in rows
    assert ["BLOCK", "1"] in rows
    assert ["positions", "12", "to", "19"] in rows
