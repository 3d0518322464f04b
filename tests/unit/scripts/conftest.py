from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Program = Callable[[str, str], Path]
SERVER = "echo 'version: 0.6.0-dev (build 11434, commit b11434)'"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty cache and nothing installed; returns the only folder on its PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    for variable in ("KVPROXY_TEST_LLAMA_SERVER", "CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    return folder


@pytest.fixture
def program(machine: Path) -> Program:
    """Put a shell script of a given name on PATH."""

    def write(name: str, script: str) -> Path:
        path = machine / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def elsewhere(tmp_path: Path, program: Program) -> Program:
    """Make a shell script of a given name off PATH."""

    def write(name: str, script: str) -> Path:
        return program(name, script).rename(tmp_path / name)

    return write
