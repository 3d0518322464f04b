"""What it costs to recognise a conversation, beyond parsing its body.

    python scripts/bench_recognition.py [--bytes 400000] [--rounds 200]

Bodies of about one size in the shapes that clients send, each compared with what is known of it: read,
chained, matched. No server is needed. The least of all rounds is told: other work only adds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvproxy.dialects.reading import read
from kvproxy.identifiers import SessionKey
from kvproxy.sessions.branches import Branches, Where
from kvproxy.sessions.lines import Asked

WORDS = "alpha beta gamma delta river stone cloud wind paper glass metal wood".split()
SECRET = b"0" * 32
SCOPE = Where(b"bench")
NEIGHBOURS = 50
"""Conversations that open alike and are known too."""

Document = dict[str, Any]


def text(seed: int, size: int) -> str:
    chooser = random.Random(seed)
    return " ".join(chooser.choice(WORDS) for _ in range(size // 6))


def turns(count: int, size: int) -> list[Document]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text(n, size // count)} for n in range(count)]


def shapes(size: int) -> Iterator[tuple[str, str, Document]]:
    """A name, the endpoint's label and the body."""
    tools = [
        {"type": "function", "function": {"name": f"t{n}", "description": text(n, size // 100)}}
        for n in range(10)
    ]
    head = {"role": "system", "content": text(0, size // 20)}
    yield "chat, 100 messages", "chat/completions", {"messages": [head, *turns(100, size)], "tools": tools}
    yield "chat, 1 message", "chat/completions", {"messages": turns(1, size)}
    blocks = [
        {"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]}
        for turn in turns(200, size)
    ]
    yield (
        "messages, 200 in blocks",
        "messages",
        {"system": [{"type": "text", "text": "s"}], "messages": blocks},
    )
    yield "raw prompt", "completion", {"prompt": text(0, size)}


def least(rounds: int, deed: Callable[[], object]) -> float:
    """Milliseconds."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        deed()
        best = min(best, time.perf_counter() - began)
    return best * 1000


def recognise(branches: Branches, label: str, document: Document) -> None:
    match = branches.match(branches.look(SCOPE, Asked(SECRET, read(label, document))), SessionKey)
    branches.take(match)


def neighbours(branches: Branches, label: str, document: Document) -> None:
    asked = Asked(SECRET, read(label, document))
    first = branches.match(branches.look(SCOPE, asked), SessionKey)
    for _ in range(NEIGHBOURS):
        branches.fork(first, SessionKey)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print(f"{'':26}{'bytes':>9}{'parse ms':>10}{'recognise ms':>14}{f'among {NEIGHBOURS + 1} ms':>14}")
    for name, label, document in shapes(options.bytes):
        body = orjson.dumps(document)
        branches, crowd = Branches(), Branches()
        neighbours(crowd, label, document)
        parse = least(options.rounds, lambda body=body: orjson.loads(body))  # type: ignore[misc]
        alone = least(options.rounds, lambda b=branches, d=document, at=label: recognise(b, at, d))  # type: ignore[misc]
        among = least(options.rounds, lambda b=crowd, d=document, at=label: recognise(b, at, d))  # type: ignore[misc]
        print(f"{name:26}{len(body):9}{parse:10.3f}{alone:14.3f}{among:14.3f}")


if __name__ == "__main__":
    main()
