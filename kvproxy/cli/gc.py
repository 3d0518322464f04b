"""`kvproxy gc`."""

from __future__ import annotations

import argparse

from kvproxy.cli.daemon_client import add_daemon_arguments, as_json, client_from
from kvproxy.doctor.sizes import count

NAME = "gc"
HELP = "Delete snapshots beyond the retention bounds, and files that no manifest names."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_daemon_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")


def run(args: argparse.Namespace) -> int:
    answer = client_from(args).post(f"/kvproxy/gc{'?dry_run=1' if args.dry_run else ''}")
    word = "would be deleted" if args.dry_run else "deleted"
    text = "\n".join([*answer["deleted"], f"{count(len(answer['deleted']), 'snapshot')} {word}"])
    print(as_json(answer) if args.json else text)
    return 0
