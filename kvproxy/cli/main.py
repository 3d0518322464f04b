"""Picks the command, calls it, turns errors into one line each and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from kvproxy import __version__
from kvproxy.cli import (
    check_config,
    doctor,
    flush,
    gc,
    inspect,
    invalidate,
    purge,
    save,
    serve,
    sessions,
    slots,
    snapshots,
    status,
)
from kvproxy.cli.daemon_client import as_json
from kvproxy.errors import KvproxyError, SettingsError

DONE = 0
FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130
"""As a shell reports it."""


class Command(Protocol):
    """What a module of this package offers."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...

    def run(self, args: argparse.Namespace, /) -> int: ...


COMMANDS: tuple[Command, ...] = (
    serve,
    check_config,
    doctor,
    status,
    slots,
    sessions,
    snapshots,
    inspect,
    save,
    invalidate,
    purge,
    flush,
    gc,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 1 failed, 2 wrong usage or settings, 130 interrupted."""
    try:
        code = _outcome(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who reads our output has seen enough of it (`| head`). The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _outcome(argv: Sequence[str]) -> int:
    wants_json = "--json" in argv
    try:
        args, unknown = _parser().parse_known_args(argv)
        if unknown:
            # Of the command, whose own flags are what to look at; argparse would name the help of all.
            program = f"kvproxy {args.command}"
            raise _Misused(program, f"unrecognized arguments: {' '.join(unknown)}; see {program} --help")
    except _Misused as error:
        return _fail(error.program, error, wants_json=wants_json)
    try:
        return int(args.run(args))
    except KvproxyError as error:
        return _fail(f"kvproxy {args.command}", error, wants_json=wants_json)


def _fail(program: str, error: KvproxyError, *, wants_json: bool) -> int:
    """The words go to stderr; who asked for JSON finds an object where the answer would be."""
    for line in str(error).splitlines():
        print(f"{program}: {line}", file=sys.stderr)
    if wants_json:
        print(as_json({"error": {"code": error.code, "message": str(error)}}))
    return WRONG_USAGE if isinstance(error, SettingsError) else FAILED


class _Misused(SettingsError):
    """Wrong usage of the command whose name is `program`."""

    def __init__(self, program: str, message: str) -> None:
        super().__init__(message)
        self.program = program


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one line that names the mend, not a page."""

    def error(self, message: str) -> NoReturn:
        raise _Misused(self.prog, f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvproxy", description="KV-aware reverse proxy for llama-server.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvproxy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        chosen = commands.add_parser(
            command.NAME, help=command.HELP, description=command.HELP, allow_abbrev=False
        )
        command.add_arguments(chosen)
        chosen.set_defaults(run=command.run)
    return parser
