"""The command line: one module for each command, with `NAME`, `HELP`, `add_arguments(parser)` and
`run(args) -> int`; `main` picks and calls."""

from kvproxy.cli.main import main

__all__ = ["main"]
