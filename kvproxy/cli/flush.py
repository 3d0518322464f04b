"""`kvproxy flush`."""

from __future__ import annotations

import argparse

from kvproxy.cli.daemon_client import add_daemon_arguments, as_json, client_from

NAME = "flush"
HELP = "Save every conversation that is not saved yet, waiting for running requests."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    answer = client_from(args).post("/kvproxy/flush")
    print(as_json(answer) if args.json else f"{answer['saved']} saved, {answer['failed']} failed")
    return 1 if answer["failed"] else 0
