from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import llama_server, llama_server_build
from scripts.console import Trouble

from .conftest import SERVER, Program

PYTHON = sys.executable  # before the machine fixture puts a stub in its place


@pytest.fixture
def cached(program: Program) -> Path:
    target = llama_server_build.installed()
    target.parent.mkdir()
    return program("llama-server", SERVER).rename(target)


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_server_build, "build", lambda: pytest.fail("built"))


@pytest.mark.usefixtures("cached", "no_build")
def test_the_path_asked_for_comes_before_all_others(
    program: Program, elsewhere: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for, in_environment = elsewhere("mine", SERVER), elsewhere("environments", SERVER)
    program("llama-server", SERVER)
    monkeypatch.setenv("KVPROXY_TEST_LLAMA_SERVER", str(in_environment))
    assert llama_server.find_or_build(asked_for) == asked_for
    assert llama_server.find_or_build() == in_environment


@pytest.mark.usefixtures("no_build")
def test_a_server_on_path_comes_before_the_cached_one(program: Program, cached: Path) -> None:
    assert llama_server.find_or_build() == cached
    on_path = program("llama-server", SERVER)
    assert llama_server.find_or_build() == on_path


@pytest.mark.usefixtures("cached", "no_build")
def test_a_path_asked_for_that_does_not_run_is_an_error_and_not_passed_over(
    elsewhere: Program, tmp_path: Path
) -> None:
    for path in (tmp_path / "missing", elsewhere("other-program", "echo hello"), elsewhere("bad", "exit 1")):
        with pytest.raises(Trouble, match=path.name):
            llama_server.find_or_build(path)


@pytest.mark.usefixtures("no_build")
def test_a_server_on_path_that_does_not_run_is_passed_over(
    program: Program, cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = program("llama-server", "exit 127")
    assert llama_server.find_or_build() == cached
    assert f"passing over {broken}" in capsys.readouterr().err


def test_a_server_of_another_build_is_taken_and_its_version_said(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    on_path = program("llama-server", "echo 'version: 6000 (abcdef1)' >&2")
    assert llama_server.find_or_build() == on_path
    assert "llama-server 6000 (abcdef1); kvproxy is tested with b11434" in capsys.readouterr().err


def test_without_any_server_one_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(llama_server_build, "build", lambda: tmp_path / "built")
    assert llama_server.find() is None
    assert llama_server.find_or_build() == tmp_path / "built"


def test_run_as_a_file_from_anywhere_it_prints_the_path_and_nothing_else(
    program: Program, tmp_path: Path
) -> None:
    on_path = program("llama-server", SERVER)
    command = [PYTHON, str(Path(llama_server.__file__))]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{on_path}\n"
    assert "build 11434" in ended.stderr
