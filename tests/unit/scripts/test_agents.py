from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from scripts import agents, cache
from scripts.agents import AGENTS
from scripts.console import Trouble

from .conftest import Program

CLAUDE, OPENCODE, CODEX = AGENTS
URL = "http://127.0.0.1:1"

# Puts an empty program where `--prefix` says, and its own arguments beside it.
NPM = """\
for argument; do
  [ "$previous" = --prefix ] && folder=$argument
  previous=$argument
done
target=$folder/node_modules/@anthropic-ai/claude-code-linux-x64
/bin/mkdir -p "$target"
: > "$target/claude"
echo "$*" > "$folder/asked"
"""


def test_an_agent_is_fetched_once_at_its_version_and_runs_no_script(program: Program) -> None:
    program("npm", NPM)
    found = agents.installed(CLAUDE)
    asked = (cache.folder() / "agents" / f"claude-{CLAUDE.version}" / "asked").read_text()
    assert f"{CLAUDE.package}@{CLAUDE.version}" in asked
    assert "--ignore-scripts" in asked
    program("npm", "exit 1")
    assert agents.installed(CLAUDE) == found


def test_without_npm_it_is_said_what_is_missing() -> None:
    with pytest.raises(Trouble, match="npm is needed to fetch opencode-ai"):
        agents.installed(OPENCODE)


def test_a_failed_fetch_shows_what_npm_said(program: Program) -> None:
    program("npm", "echo 'no such package'; exit 1")
    with pytest.raises(Trouble, match="no such package"):
        agents.installed(CODEX)


def test_a_package_without_a_program_for_this_machine_is_trouble(program: Program) -> None:
    program("npm", "exit 0")
    with pytest.raises(Trouble, match="for this machine"):
        agents.installed(CODEX)


def test_each_agent_is_pointed_at_us(tmp_path: Path) -> None:
    assert CLAUDE.settle(tmp_path, tmp_path, URL)["ANTHROPIC_BASE_URL"] == URL
    OPENCODE.settle(tmp_path, tmp_path, URL)
    provider = json.loads((tmp_path / "opencode.json").read_text())["provider"]["local"]
    assert provider["options"]["baseURL"] == f"{URL}/v1"
    CODEX.settle(tmp_path, tmp_path, URL)
    settings = tomllib.loads((tmp_path / ".codex" / "config.toml").read_text())
    assert settings["model_providers"][settings["model_provider"]]["base_url"] == f"{URL}/v1"
