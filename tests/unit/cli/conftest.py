"""A daemon of a few lines, for commands that ask one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from kvproxy.cli import main


@dataclass
class Daemon:
    """Gives `answers[(method, path)]` with its status; remembers what was asked, with the Authorization."""

    answers: dict[tuple[str, str], tuple[int, object]] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def gives(self, method: str, path: str, body: object, status: int = 200) -> None:
        self.answers[method, path] = (status, body)

    def refuses(self, method: str, path: str, status: int, code: str, message: str) -> None:
        self.headers["X-KVProxy-Error"] = code
        self.gives(method, path, {"error": {"message": message, "code": code}}, status)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    known = Daemon()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            known.asked.append((self.command, self.path, self.headers.get("Authorization")))
            status, body = known.answers.get((self.command, self.path), (404, "nothing here"))
            raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**known.headers, "Content-Length": str(len(raw))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            """Not on a test's stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        known.port = server.server_address[1]
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.005})
        thread.start()
        try:
            yield known
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True)
class Shown:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[list[str]]:
        return [line.split() for line in self.out.splitlines()]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Ask = Callable[..., Shown]


@pytest.fixture
def ask(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command against `daemon`."""

    def run(*argv: str) -> Shown:
        code = main([*argv, "--url", daemon.url])
        return Shown(code, *capsys.readouterr())

    return run
