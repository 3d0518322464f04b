"""A wire in front of kvproxy that forwards every byte, and what a client asked and was answered on it."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_REQUEST_LINE = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.[01]\r\n")
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answered:
    """One request and its answer. `computed` and `reused` are prompt tokens, None where it did not tell.
    `status` 0: it was never answered."""

    method: str
    target: str
    status: int
    headers: Mapping[str, str]
    computed: int | None
    reused: int | None


@dataclass(slots=True)
class _Connection:
    asked: list[tuple[str, str]] = field(default_factory=list)
    answered: bytearray = field(default_factory=bytearray)

    def note(self, sent: bytes) -> None:
        # No client of ours sends a request before the last was answered, so each begins a piece of its own.
        if match := _REQUEST_LINE.match(sent):
            self.asked.append((match[1].decode(), match[2].decode()))


class Wire:
    """Listens from the moment it is made; its threads end with the process."""

    def __init__(self, to_port: int) -> None:
        self._to = to_port
        self._connections: list[_Connection] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def take(self) -> list[Answered]:
        """What was asked since this was last called, once the client has ended."""
        taken, self._connections = self._connections, []
        return [answer for one in taken for answer in answers(one.asked, bytes(one.answered))]

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            connection = _Connection()
            self._connections.append(connection)
            server = socket.create_connection(("127.0.0.1", self._to))
            _start(client, server, connection.note)
            _start(server, client, connection.answered.extend)


def answers(asked: Sequence[tuple[str, str]], answered: bytes) -> Iterator[Answered]:
    """What one connection carried: `asked` as method and target, `answered` all bytes that came back."""
    rest = _Rest(answered)
    for method, target in asked:
        # It wants a socket; all that it asks of one is a file to read.
        response = http.client.HTTPResponse(rest, method=method)  # type: ignore[arg-type]
        try:
            response.begin()
        except http.client.HTTPException:
            yield Answered(method, target, 0, {}, None, None)
            return
        headers = {name.lower(): value for name, value in response.getheaders()}
        try:
            body = response.read()
        except http.client.IncompleteRead as cut:
            body = cut.partial
        yield Answered(method, target, response.status, headers, *tokens_of(body))


def tokens_of(body: bytes) -> tuple[int | None, int | None]:
    """Prompt tokens computed and reused, by an answer or the events of one, in any dialect."""
    found: tuple[int | None, int | None] = (None, None)
    for document in _documents(body):
        for part in (document, document.get("message"), document.get("response")):
            if isinstance(part, dict):
                found = _counted(part) or found
    return found


def _documents(body: bytes) -> Iterator[dict[str, Any]]:
    lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    for text in lines or [body]:
        try:
            document = json.loads(text)
        except ValueError:  # a client that left cut it short, or it is no JSON at all
            continue
        if isinstance(document, dict):
            yield document


def _counted(part: Mapping[str, Any]) -> tuple[int, int] | None:
    timings, usage = part.get("timings"), part.get("usage")
    if timings:
        return timings["prompt_n"], timings["cache_n"]
    if not usage:
        return None
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"], usage["cache_read_input_tokens"]
    if "input_tokens_details" in usage:
        reused = usage["input_tokens_details"]["cached_tokens"]
        return usage["input_tokens"] - reused, reused
    return None


class _Rest(io.BytesIO):
    """Bytes that several answers are read from in turn, none of which may close it."""

    def makefile(self, mode: str) -> _Rest:
        return self

    def close(self) -> None:
        pass


def _start(source: socket.socket, sink: socket.socket, note: Callable[[bytes], None]) -> None:
    threading.Thread(target=_forward, args=(source, sink, note), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket, note: Callable[[bytes], None]) -> None:
    try:
        while data := source.recv(_READ_BYTES):
            note(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # one end broke off: so does the other
        for end in (source, sink):
            end.close()
