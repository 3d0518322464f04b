"""What a resident request pays for kvproxy: latency and our CPU, paired against the server itself.

    python scripts/bench_overhead.py [--requests 1000] [--model MODEL.gguf]

A real llama-server with a tiny model, one slot for the direct requests and one for the proxied ones. Both
clients hold one keep-alive connection and send the same resident chat request. Each pair is sent in random
order, so that whatever else the machine does falls on both; what is reported is the difference within pairs.
CPU is the kvproxy process's own user and system time, by /proc, over all proxied requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.child import die_with_parent
from scripts.llama_server import find_or_build
from scripts.models import tiny
from scripts.ports import free_port, wait_until_answers
from scripts.tiny_models import Kind

WARM_UP = 50
WORDS = 300


def body(slot: int | None) -> dict[str, object]:
    text = " ".join(random.Random(1).choice(("alpha", "beta", "gamma", "delta")) for _ in range(WORDS))
    asked: dict[str, object] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "temperature": 0,
    }
    if slot is not None:
        asked |= {"id_slot": slot, "cache_prompt": True}
    return asked


async def timed(session: aiohttp.ClientSession, url: str, data: bytes, headers: dict[str, str]) -> float:
    began = time.perf_counter()
    async with session.post(url, data=data, headers=headers) as response:
        answer = await response.read()
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {answer[:200]!r}")
    return (time.perf_counter() - began) * 1000


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(direct: str, proxied: str, pid: int, requests: int) -> dict[str, float]:
    """All in milliseconds."""
    json_type = {"Content-Type": "application/json"}
    ways = {
        "direct": (f"{direct}/v1/chat/completions", json.dumps(body(1)).encode(), json_type),
        "proxied": (
            f"{proxied}/v1/chat/completions",
            json.dumps(body(None)).encode(),
            json_type | {"X-Session-Id": "bench"},
        ),
    }
    times: dict[str, list[float]] = {"direct": [], "proxied": []}
    order = list(ways)
    async with aiohttp.ClientSession() as session:
        for _ in range(WARM_UP):
            for way in order:
                await timed(session, *ways[way])
        before = cpu_seconds(pid)
        for _ in range(requests):
            random.shuffle(order)
            for way in order:
                times[way].append(await timed(session, *ways[way]))
        cpu = (cpu_seconds(pid) - before) / requests * 1000
    added = sorted(p - d for p, d in zip(times["proxied"], times["direct"], strict=True))
    return {
        "direct_p50": statistics.median(times["direct"]),
        "proxied_p50": statistics.median(times["proxied"]),
        "added_p50": statistics.median(added),
        "added_p90": added[int(len(added) * 0.9)],
        "cpu_per_request": cpu,
    }


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, preexec_fn=lambda: die_with_parent(signal.SIGKILL)
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    model = args.model or tiny(Kind.LLAMA)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({k: round(v, 3) for k, v in run(Path(folder), model, args.requests).items()}))


def run(folder: Path, model: Path, requests: int) -> dict[str, float]:
    up, own = free_port(), free_port()
    (folder / "slots").mkdir()
    server = [str(find_or_build()), "-m", str(model), "--host", "127.0.0.1", "--port", str(up), "-np", "2"]
    server += ["-c", "16384", "-t", "1", "--cache-ram", "0", "--slot-save-path", str(folder / "slots")]
    proxy = [sys.executable, "-m", "kvproxy", "serve", "--upstream", f"http://127.0.0.1:{up}"]
    proxy += ["--listen", f"127.0.0.1:{own}", "--state-dir", str(folder / "state")]
    with running(server, folder / "server.log"):
        wait_until_answers(f"http://127.0.0.1:{up}/health")
        with running(proxy, folder / "proxy.log") as process:
            wait_until_answers(f"http://127.0.0.1:{own}/kvproxy/readyz")
            return asyncio.run(
                measure(f"http://127.0.0.1:{up}", f"http://127.0.0.1:{own}", process.pid, requests)
            )


if __name__ == "__main__":
    main()
