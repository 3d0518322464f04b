"""What a resident request pays for kvproxy: latency and our CPU, paired against the server itself.

    python scripts/bench_overhead.py [--requests 1000] [--words 300] [--model MODEL.gguf]

A real llama-server with a tiny model, one slot for the direct requests and one for the proxied ones. The
same resident chat request goes three ways, each over a keep-alive connection: direct, through kvproxy, and
through a bare forwarder (`bare_forwarder.py`: an aiohttp server and client that do nothing else), which shows
what the machine asks for any such hop at that moment. The three are sent in random order, so that whatever
else the machine does falls on all; what is reported is the difference to the direct one beside it. CPU is the
process's own user and system time, by /proc, over all its requests. All in milliseconds.
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
DIRECT, PROXIED, BARE = "direct", "kvproxy", "bare forwarder"


def body(slot: int | None, words: int) -> dict[str, object]:
    text = " ".join(random.Random(1).choice(("alpha", "beta", "gamma", "delta")) for _ in range(words))
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


async def measure(
    urls: dict[str, str], pids: dict[str, int], requests: int, words: int
) -> dict[str, list[float]]:
    """For each way the milliseconds of all its requests; those at one place were sent one after the other."""
    headers = {"Content-Type": "application/json", "X-Session-Id": "bench"}
    pinned, plain = (json.dumps(body(slot, words)).encode() for slot in (1, None))
    times: dict[str, list[float]] = {way: [] for way in urls}
    order = list(urls)

    async def once(way: str) -> float:
        data = plain if way == PROXIED else pinned
        return await timed(session, f"{urls[way]}/v1/chat/completions", data, headers)

    async with aiohttp.ClientSession() as session:
        for _ in range(WARM_UP):
            for way in order:
                await once(way)
        before = {way: cpu_seconds(pid) for way, pid in pids.items()}
        for _ in range(requests):
            random.shuffle(order)
            for way in order:
                times[way].append(await once(way))
    for way, pid in pids.items():
        times[f"{way} cpu"] = [(cpu_seconds(pid) - before[way]) / requests * 1000]
    return times


def report(times: dict[str, list[float]]) -> str:
    direct = times[DIRECT]
    lines = [f"{DIRECT:15} p50 {statistics.median(direct):5.2f}"]
    for way in (PROXIED, BARE):
        added = sorted(there - here for there, here in zip(times[way], direct, strict=True))
        p50, p90 = statistics.median(added), added[int(len(added) * 0.9)]
        lines.append(
            f"{way:15} p50 {statistics.median(times[way]):5.2f}"
            f"  added p50 {p50:5.2f}  p90 {p90:5.2f}  CPU {times[f'{way} cpu'][0]:5.2f}"
        )
    return "\n".join(lines)


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
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    model = args.model or tiny(Kind.LLAMA)
    with tempfile.TemporaryDirectory() as folder:
        print(report(run(Path(folder), model, args.requests, args.words)))


def run(folder: Path, model: Path, requests: int, words: int) -> dict[str, list[float]]:
    up, own, bare = free_port(), free_port(), free_port()
    urls = {way: f"http://127.0.0.1:{port}" for way, port in ((DIRECT, up), (PROXIED, own), (BARE, bare))}
    (folder / "slots").mkdir()
    server = [str(find_or_build()), "-m", str(model), "--host", "127.0.0.1", "--port", str(up), "-np", "2"]
    server += ["-c", "16384", "-t", "1", "--cache-ram", "0", "--slot-save-path", str(folder / "slots")]
    proxy = [sys.executable, "-m", "kvproxy", "serve", "--upstream", urls[DIRECT]]
    proxy += ["--listen", f"127.0.0.1:{own}", "--state-dir", str(folder / "state")]
    forwarder = [sys.executable, str(Path(__file__).with_name("bare_forwarder.py")), urls[DIRECT], str(bare)]
    with running(server, folder / "server.log"):
        wait_until_answers(f"{urls[DIRECT]}/health")
        with (
            running(proxy, folder / "proxy.log") as process,
            running(forwarder, folder / "bare.log") as other,
        ):
            wait_until_answers(f"{urls[PROXIED]}/kvproxy/readyz")
            pids = {PROXIED: process.pid, BARE: other.pid}
            return asyncio.run(measure(urls, pids, requests, words))


if __name__ == "__main__":
    main()
