"""Coding agents that run without a screen: how each is installed, pointed at kvproxy, and asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts import cache, child, console

ANSWER_TOKENS = 64
"""Our models talk at random, and would not stop."""


@dataclass(frozen=True, slots=True)
class Agent:
    """`program` is relative to `node_modules`. `settle` writes its settings into an empty home and work
    folder and returns its environment; `first` and `later` are the words before a prompt, with which a
    conversation begins and goes on."""

    name: str
    package: str
    version: str
    megabytes: int
    program: str
    settle: Callable[[Path, Path, str], Mapping[str, str]]
    first: Sequence[str]
    later: Sequence[str]


def _claude(home: Path, work: Path, url: str) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "local",
        "ANTHROPIC_MODEL": "local",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(ANSWER_TOKENS),
    }


def _opencode(home: Path, work: Path, url: str) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{url}/v1", "apiKey": "local", "timeout": False},
        "models": {"local": {"name": "local", "limit": {"context": 200_000, "output": ANSWER_TOKENS}}},
    }
    settings = {
        "model": "local/local",
        "provider": {"local": provider},
        "autoupdate": False,
        "share": "disabled",
    }
    (work / "opencode.json").write_text(json.dumps(settings))
    return {}


def _codex(home: Path, work: Path, url: str) -> Mapping[str, str]:
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f"""model = "local"
model_provider = "local"
model_context_window = 200000
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""
    )
    return {}


AGENTS = (
    Agent(
        "claude",
        "@anthropic-ai/claude-code",
        "2.1.197",
        235,
        "@anthropic-ai/claude-code-linux-x64/claude",
        _claude,
        ("-p",),
        ("-c", "-p"),
    ),
    Agent(
        "opencode",
        "opencode-ai",
        "1.18.33",
        354,
        "opencode-linux-x64/bin/opencode",
        _opencode,
        ("run",),
        ("run", "-c"),
    ),
    Agent(
        "codex",
        "@openai/codex",
        "0.171.0",
        300,
        "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
        _codex,
        ("exec", "--skip-git-repo-check"),
        ("exec", "resume", "--last", "--skip-git-repo-check"),
    ),
)


def installed(agent: Agent) -> Path:
    """Its program, in the user's cache; fetched by npm if missing. Raises `console.Trouble`."""
    folder = cache.folder() / "agents" / f"{agent.name}-{agent.version}"
    program = folder / "node_modules" / agent.program
    if not program.is_file():
        _install(agent, folder)
    if not program.is_file():
        raise console.Trouble(f"npm brought no {program.name} for this machine", "use Linux on x86-64")
    return program


def _install(agent: Agent, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise console.Trouble(f"npm is needed to fetch {agent.package}", "install Node.js")
    console.say(f"fetching {agent.package} {agent.version} ({agent.megabytes} MB)")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text("{}")
    quiet = ("--no-audit", "--no-fund", "--no-save", "--ignore-scripts", "--prefix", str(folder))
    ended = child.run([npm, "install", *quiet, f"{agent.package}@{agent.version}"])
    if ended.code != 0:
        raise console.Trouble(
            f"npm could not fetch {agent.package}:\n{ended.tail.rstrip()}", "check the network"
        )
