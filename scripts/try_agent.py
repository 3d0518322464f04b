"""A real coding agent through kvproxy to a real llama-server, several turns, the server killed between them.

    python scripts/try_agent.py claude|opencode|codex [--turns 4] [--slots 2 | --defaults] [--keep FOLDER]

The agent is fetched by npm, once (235 to 354 MB). All that runs afterwards runs in a network namespace that
has nothing but a loopback, in a home and a folder of its own. The model is tiny and talks at random, so
nothing is coded; but the prompts are the agent's own, 30,000 to 80,000 tokens each. For each of its requests
a line tells what the agent was told in status and headers, and the prompt tokens that the answer says were
computed and reused. `--defaults` leaves the number of slots and what goes with it to llama-server, `--calm`
kills nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import agents, child, console, models
from scripts.agents import AGENTS, Agent
from scripts.demo_processes import Service, is_dirty, started
from scripts.llama_server import find_or_build
from scripts.overheard import Answered, Wire
from scripts.ports import free_port
from scripts.tiny_models import Kind

CONTEXT = 200_000
"""Tokens of each slot."""
TURN_SECONDS = 600.0
SAVE_SECONDS = 60.0
INSIDE = "--inside"
ALONE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
PROMPTS = (
    "Look at this folder and tell me what is in it.",
    "Write a function that adds two numbers.",
    "Now write a test for it.",
    "Explain what you did.",
)


def server(folder: Path, binary: Path, slots: int | None) -> Service:
    """A tiny model, a token for each byte; an answer that names no end ends soon. With its own defaults for
    all that has to do with slots if their number is None."""
    port = free_port()
    (folder / "slots").mkdir()
    command = [str(binary), "-m", str(models.tiny(Kind.LLAMA)), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-n", str(agents.ANSWER_TOKENS), "--no-warmup", "--slot-save-path", str(folder / "slots")]
    if slots is None:
        command += ["-c", str(CONTEXT)]
    else:
        command += ["-np", str(slots), "-c", str(CONTEXT * slots), "--cache-ram", "0"]
    return Service("llama-server", command, port=port, path="/health", log=folder / "llama-server.log")


def kvproxy(folder: Path, upstream: Service) -> Service:
    """As it is by default, but that it saves after a second of quiet."""
    port = free_port()
    command = [sys.executable, "-m", "kvproxy", "serve", "--upstream", f"http://127.0.0.1:{upstream.port}"]
    command += ["--listen", f"127.0.0.1:{port}", "--state-dir", str(folder / "state"), "--log-format", "json"]
    command += ["--snapshot-dir", str(folder / "slots"), "--set", "checkpoint.on_idle_seconds=1"]
    return Service("kvproxy", command, port=port, path="/kvproxy/readyz", log=folder / "kvproxy.log")


def ask(agent: Agent, words: Sequence[str], work: Path, env: dict[str, str]) -> child.Ended:
    """One turn, as if it were typed by hand; the agent ends when it was answered."""
    try:
        done = subprocess.run(
            words,
            cwd=work,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TURN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise console.Trouble(
            f"{agent.name} did not end its turn within {TURN_SECONDS:.0f} s", "look at the log with --keep"
        ) from late
    return child.Ended(done.returncode, done.stdout.decode("utf-8", "replace"))


def line(turn: int, answered: Answered) -> str:
    told = {name: answered.headers.get(f"x-kvproxy-{name}", "-") for name in ("outcome", "reason", "session")}
    counts = ["-" if n is None else f"{n:,}" for n in (answered.computed, answered.reused)]
    return row(
        str(turn),
        f"{answered.method} {answered.target}",
        str(answered.status),
        *(told["outcome"], told["reason"], told["session"][:8]),
        *counts,
    )


def row(*cells: str) -> str:
    columns = zip(cells, WIDTHS, strict=True)
    return " | ".join(f"{cell[: abs(n)]:{'>' if n < 0 else '<'}{abs(n)}}" for cell, n in columns)


WIDTHS = (-4, 28, 6, 9, 20, 8, -8, -8)
"""Of the columns; negative ones stand on the right."""
HEAD = row("turn", "asked", "status", "outcome", "reason", "session", "computed", "reused")


def until_saved(proxy: Service) -> None:
    """Raises `console.Trouble` if a minute later something is unsaved."""
    until = time.perf_counter() + SAVE_SECONDS
    while time.perf_counter() < until:
        with urllib.request.urlopen(f"http://127.0.0.1:{proxy.port}/kvproxy/status") as answer:
            if not is_dirty(json.load(answer)):
                return
        time.sleep(0.2)
    raise console.Trouble("a conversation is not saved", "look at the log with --keep")


def converse(agent: Agent, program: Path, arguments: argparse.Namespace, folder: Path) -> None:
    home, work = folder / "home", folder / "work"
    for place in (home, work):
        place.mkdir()
    (work / "README.md").write_text("A folder to talk about.\n")
    upstream = server(folder, find_or_build(), arguments.slots)
    proxy = kvproxy(folder, upstream)
    with ExitStack() as stack:
        started((upstream, proxy), stack)
        wire = Wire(proxy.port)
        settled = agent.settle(home, work, wire.url)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **settled}
        print(HEAD)
        for turn in range(arguments.turns):
            words = [str(program), *(agent.later if turn else agent.first), PROMPTS[turn % len(PROMPTS)]]
            began = time.perf_counter()
            ended = ask(agent, words, work, env)
            took = time.perf_counter() - began
            for answered in wire.take():
                print(line(turn + 1, answered))
            print(f"{turn + 1:4} | {agent.name} ended with {ended.code} after {took:.1f} s", flush=True)
            (folder / f"turn-{turn + 1}.txt").write_text(ended.tail)
            until_saved(proxy)
            if not arguments.calm and turn + 1 < arguments.turns:
                upstream.kill()
                upstream.start()
    print("\n".join(summary((folder / "kvproxy.log").read_text("utf-8"))))


def summary(log: str) -> Iterator[str]:
    """What kvproxy's own log says of the whole run."""
    events: list[dict[str, Any]] = [json.loads(text) for text in log.splitlines() if text.startswith("{")]
    done = [event for event in events if event["event"] == "kv.request.done"]
    warnings = [event for event in events if event["level"] not in ("debug", "info")]
    for title, values in (
        ("outcomes", [event["outcome"] for event in done]),
        ("verdicts", [event["verdict"] for event in done]),
        ("warnings", [event["event"] for event in warnings]),
    ):
        counts = sorted(Counter(values).items())
        yield f"{title}: " + ", ".join(f"{count} {value}" for value, count in counts)


def shut_in(arguments: Sequence[str]) -> int:
    """Run this script again where nothing but this machine can be reached, and nothing outlives it."""
    for tool in ("unshare", "ip"):
        if shutil.which(tool) is None:
            raise console.Trouble(f"{tool} is needed", "install util-linux and iproute2")
    again = [sys.executable, str(Path(__file__).resolve()), *arguments, INSIDE]
    return subprocess.call([*ALONE, "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *again])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("agent", choices=[agent.name for agent in AGENTS])
    parser.add_argument("--turns", type=int, default=4)
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--slots", type=int, default=2)
    count.add_argument("--defaults", dest="slots", action="store_const", const=None)
    parser.add_argument("--calm", action="store_true", help="kill nothing")
    parser.add_argument("--keep", type=Path, help="an empty folder for logs and what the agent said")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    (agent,) = (agent for agent in AGENTS if agent.name == arguments.agent)
    program = agents.installed(agent)
    if not arguments.inside:
        find_or_build()
        models.tiny(Kind.LLAMA)
        sys.exit(shut_in(sys.argv[1:]))
    with tempfile.TemporaryDirectory() as folder:
        converse(agent, program, arguments, arguments.keep or Path(folder))


if __name__ == "__main__":
    sys.exit(console.run(main))
