"""The processes of the demo: started, killed, stopped and brought back on their ports, none left behind."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts import child, console
from scripts.ports import free_port

START_SECONDS = 90.0
STOP_SECONDS = 40.0
LOOK_SECONDS = 0.02
LAST_LINES = 12
CONTEXT = 8192
"""Tokens of both slots together."""


class Service:
    """A program that listens on a port of this machine; up when `path` answers 200."""

    def __init__(self, name: str, command: Sequence[str], *, port: int, path: str, log: Path) -> None:
        self.name = name
        self.port = port
        self._command = command
        self._path = path
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is up. Raises `console.Trouble`."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
                start_new_session=True,  # Ctrl-C is ours to hear; we end them ourselves
                preexec_fn=child.die_with_parent(signal.SIGKILL),
            )
        until = time.perf_counter() + START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.perf_counter() > until:
                raise console.Trouble(f"{self.name} did not start", f"see why:\n{self.last_lines()}")
            time.sleep(LOOK_SECONDS)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()  # of one that has ended nothing is left to kill
            self._process.wait()

    def stop(self) -> None:
        """Ask it to end and wait. Raises `console.Trouble` if it does not end well."""
        assert self._process is not None, f"{self.name} was never started"
        self._process.terminate()
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = -signal.SIGKILL
        if code != 0:
            raise console.Trouble(f"{self.name} ended with code {code}", f"see why:\n{self.last_lines()}")

    def last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def _is_up(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", self._path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # nobody listens yet
            return False
        finally:
            connection.close()


def llama_server(binary: Path, model: Path, folder: Path, name: str) -> Service:
    """A llama-server with two slots that may be saved in `folder`/slots."""
    slots = folder / "slots"
    slots.mkdir(parents=True)
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--slot-save-path", str(slots)]
    what = ["--model", str(model), "-np", "2", "-c", str(CONTEXT), "--no-warmup"]
    log = folder / "llama-server.log"
    return Service(name, [str(binary), *what, *where], port=port, path="/health", log=log)


def kvproxy(upstream: Service, folder: Path) -> Service:
    """A kvproxy before `upstream`, which sees its snapshots and saves after a second of quiet."""
    port = free_port()
    where = ["--upstream", f"http://127.0.0.1:{upstream.port}", "--listen", f"127.0.0.1:{port}"]
    keeps = ["--state-dir", str(folder / "state"), "--snapshot-dir", str(folder / "slots")]
    command = [sys.executable, "-m", "kvproxy", "serve", *where, *keeps]
    command += ["--set", "checkpoint.on_idle_seconds=1"]
    return Service("kvproxy", command, port=port, path="/kvproxy/readyz", log=folder / "kvproxy.log")


def started(services: Sequence[Service], stack: ExitStack) -> None:
    """Start them in order; whatever happens, `stack` ends them."""
    for service in services:
        stack.callback(service.kill)
        service.start()


def environment() -> dict[str, str]:
    """Ours without settings of kvproxy: they are for the one at home."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVPROXY_")}


def is_dirty(status: dict[str, Any]) -> bool:
    """Whether kvproxy's status shows a conversation with unsaved work."""
    return any(slot["dirty"] for server in status["servers"] for slot in server["slots"])
