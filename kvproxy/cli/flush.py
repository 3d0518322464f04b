"""`kvproxy flush`."""

from __future__ import annotations

import argparse
import sys

from kvproxy.cli.daemon_client import add_daemon_arguments, as_json, client_from

NAME = "flush"
WHY = "kvproxy's log says why a save failed (kv.session.save.failed); `kvproxy save SESSION` tries one again"
HELP = "Save every conversation that is not saved yet, waiting for running requests."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    answer = client_from(args).post("/kvproxy/flush")
    print(as_json(answer) if args.json else f"{answer['saved']} saved, {answer['failed']} failed")
    if not answer["failed"]:
        return 0
    print(f"kvproxy flush: {WHY}", file=sys.stderr)
    return 1
