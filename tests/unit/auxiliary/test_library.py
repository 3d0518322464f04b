from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.auxiliary.library import load, packaged, read
from kvproxy.errors import SettingsError

GOOD = "- {client: mine, where: system, starts: You name things}\n"


def test_the_operators_wordings_come_before_our_own(tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(GOOD)
    assert [one.client for one in read(file)] == ["mine"]
    assert load(file)[0].client == "mine"
    assert load(file)[1:] == packaged() == load(None)


def test_an_empty_file_adds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("# none yet\n")
    assert read(file) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("client: x\n", "should be a list of entries with client, where, and starts or contains"),
        (GOOD + "- {client: b, where: there, starts: long enough}\n", "entry 2, where: should be"),
        ("- {client: b, where: system}\n", "entry 1: should have starts or contains"),
        ("- {client: b, where: system, starts: long enough, color: red}\n", "entry 1, color: "),
        ("- {client: b\n- x", "line 2 is not YAML"),
        ("- 7\n", "entry 1: should be"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_entry_and_the_reason(
    tmp_path: Path, text: str, reason: str
) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read(file)
    told = str(caught.value)
    assert told.startswith(f"auxiliary.fingerprints: {file}: ")
    assert reason in told


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read(tmp_path / "none.yaml")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="UTF-8"):
        read(tmp_path / "bytes")
