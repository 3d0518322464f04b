"""What outlives us of the conversations we know: keyed digests, and the secret they are keyed with.

Both lie in the state directory. The secret is written once, when there is none; the branches are written off
the request path, a little after they changed. A damaged file costs what it held and nothing else: a branch
that was lost comes back under its name with the next request of its conversation, unless it is the secret
that was lost, on which the names depend.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from kvproxy.identifiers import SessionKey
from kvproxy.sessions.branches import Branch, Branches
from kvproxy.sessions.lines import LINK_BYTES, Line
from kvproxy.snapshots.atomic import write_atomic

PERIOD_SECONDS = 10.0
"""What a kill loses of it is found again by name, all but one half of a conversation that forked since."""
REST = 50
"""Times as long as a write took: writing takes no more than 2 % of the time, however much is known."""
SECRET_BYTES = 32
MAX_BYTES = 256 << 20
VERSION = 1

_Fields = dict[str, Any]


class BranchMemory:
    """Keeps `branches` in `folder`. Until `load` the secret is one of this process alone."""

    def __init__(self, folder: Path, branches: Branches) -> None:
        self._secret_path = folder / "conversations.key"
        self._path = folder / "conversations.json"
        self._branches = branches
        self._written = branches.changes
        self._writing = asyncio.Lock()
        self._complained = False
        self.secret = secrets.token_bytes(SECRET_BYTES)

    async def load(self) -> str | None:
        """Take up what was kept; a complaint if it is not whole, or nothing can be kept."""
        try:
            self.secret = await asyncio.to_thread(_secret_at, self._secret_path)
        except OSError as error:
            return f"{self._secret_path} cannot be used, so conversations are not known again: {_why(error)}"
        try:
            data = await asyncio.to_thread(_read, self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"cannot read {self._path}: {_why(error)}"
        found, is_whole = await asyncio.to_thread(decode, data)
        self._branches.adopt(found)
        self._written = self._branches.changes
        return None if is_whole else f"{self._path} is damaged: {len(found)} conversations were read from it"

    async def run(self, complain: Callable[[str | None], None]) -> None:
        """Write what changed, for ever."""
        now, took = asyncio.get_running_loop().time, 0.0
        while True:
            await asyncio.sleep(max(PERIOD_SECONDS, REST * took))
            began = now()
            complain(await self.write())
            took = now() - began

    async def write(self) -> str | None:
        """Write down what is known now, if it is not what stands there; the first complaint of a row."""
        async with self._writing:
            changes = self._branches.changes
            if changes == self._written:
                return None
            rows = [_row(branch) for branch in self._branches.all() if branch.may_persist]
            try:
                await asyncio.to_thread(_write, self._path, rows)
            except OSError as error:
                is_first, self._complained = not self._complained, True
                return f"cannot write {self._path}: {_why(error)}" if is_first else None
            self._written, self._complained = changes, False
            return None


def encode(branches: Iterable[Branch]) -> bytes:
    return _encode([_row(branch) for branch in branches])


def decode(data: bytes) -> tuple[list[Branch], bool]:
    """What can be read of it, and whether that is all."""
    try:
        file = orjson.loads(data)
        rows = file["branches"] if file["version"] == VERSION and file["order"] == sys.byteorder else None
    except (orjson.JSONDecodeError, KeyError, TypeError):
        rows = None
    if not isinstance(rows, list):
        return [], False
    found = list(_branches(rows))
    return found, len(found) == len(rows)


def _branches(rows: list[Any]) -> Iterator[Branch]:
    for row in rows:
        try:
            yield _branch(row)
        except (KeyError, TypeError, ValueError):
            # Half a row is no conversation; its like comes back with its next request.
            continue


_Row = tuple[bytes, str, str, str | None, int, Line, Line | None]


def _row(branch: Branch) -> _Row:
    """What is written of it, which nobody changes any more."""
    return branch.scope, branch.name, branch.key, branch.parent, branch.born, branch.line, branch.past


def _encode(rows: list[_Row]) -> bytes:
    fields = [
        {
            "scope": scope.hex(),
            "name": name,
            "key": key,
            "parent": parent,
            "born": born,
            "line": _line_fields(line),
            "past": None if past is None else _line_fields(past),
        }
        for scope, name, key, parent, born, line, past in rows
    ]
    return orjson.dumps({"version": VERSION, "order": sys.byteorder, "branches": fields})


def _branch(row: _Fields) -> Branch:
    parent, past = row["parent"], row["past"]
    return Branch(
        bytes.fromhex(row["scope"]),
        _text(row["name"]),
        SessionKey(_text(row["key"])),
        _line(row["line"]),
        int(row["born"]),
        None if parent is None else SessionKey(_text(parent)),
        None if past is None else _line(past),
    )


def _line_fields(line: Line) -> _Fields:
    return {
        "chain": b64encode(line.chain).decode(),
        "ends": b64encode(line.ends).decode(),
        "head": line.head,
        "before_reply": line.before_reply,
        "has_tools": line.has_tools,
        "traces": [trace.hex() for trace in line.traces],
        "rest": line.rest.hex(),
        "rest_bytes": line.rest_bytes,
    }


def _line(fields: _Fields) -> Line:
    line = Line(
        b64decode(fields["chain"], validate=True),
        b64decode(fields["ends"], validate=True),
        int(fields["head"]),
        int(fields["before_reply"]),
        bool(fields["has_tools"]),
        tuple(bytes.fromhex(trace) for trace in fields["traces"]),
        bytes.fromhex(fields["rest"]),
        int(fields["rest_bytes"]),
    )
    is_even = len(line.chain) == len(line) * LINK_BYTES == 2 * len(line.ends)
    if not is_even or not 0 <= line.head < len(line) or not 0 < line.before_reply <= len(line):
        raise ValueError("not a line")
    return line


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("not a text")
    return value


def _secret_at(path: Path) -> bytes:
    """The secret kept there, or a new one that is there from now on. Blocks; OSError."""
    try:
        found = bytes.fromhex(_read(path).decode("ascii", "replace"))
    except (FileNotFoundError, ValueError):
        found = b""
    if len(found) == SECRET_BYTES:
        return found
    fresh = secrets.token_bytes(SECRET_BYTES)
    write_atomic(path, fresh.hex().encode() + b"\n")
    return fresh


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES)


def _write(path: Path, rows: list[_Row]) -> None:
    write_atomic(path, _encode(rows))


def _why(error: OSError) -> str:
    return error.strerror or str(error)
