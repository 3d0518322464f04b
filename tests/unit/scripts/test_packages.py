from __future__ import annotations

from pathlib import Path

import pytest

from scripts import packages
from scripts.console import Trouble

from .conftest import Program

SDIST = packages.Pin("thing", "1.0", "ab" * 32, megabytes=1, is_source=True)

# Leaves the requirements file it was given, and its own arguments, where the download should lie.
PIP = """\
for destination; do :; done
for argument; do
  [ "$previous" = --requirement ] && requirement=$argument
  previous=$argument
done
{ read -r line < "$requirement"; echo "$line"; echo "$*"; } > "$destination/thing-1.0.tar.gz"
"""


def test_pip_is_asked_for_the_one_file_of_that_hash(program: Program, tmp_path: Path) -> None:
    program("python", PIP)
    line, arguments = packages.download(SDIST, tmp_path / "download").read_text().splitlines()
    assert line == f"thing==1.0 --hash=sha256:{'ab' * 32}"
    assert "-m pip download --no-deps --no-binary thing --require-hashes" in arguments


def test_a_wheel_is_never_built_from_source(tmp_path: Path) -> None:
    wheel = packages.Pin("thing", "1.0", "ab" * 32, megabytes=1)
    assert "--only-binary" in packages.pip_command(wheel, tmp_path, tmp_path)


def test_a_failed_fetch_shows_what_pip_said(program: Program, tmp_path: Path) -> None:
    program("python", "echo 'ERROR: no matching distribution'; exit 1")
    with pytest.raises(Trouble, match=r"could not fetch thing==1\.0:\nERROR: no matching distribution"):
        packages.download(SDIST, tmp_path / "download")
