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
    args = _parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who reads our output has seen enough of it (`| head`). The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SettingsError as error:
        _complain(args.command, str(error))
        return WRONG_USAGE
    except KvproxyError as error:
        _complain(args.command, str(error))
        return FAILED


def _complain(command: str, message: str) -> None:
    for line in message.splitlines():
        print(f"kvproxy {command}: {line}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one line that names the mend, not a page."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


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
