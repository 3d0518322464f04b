"""`kvproxy purge SESSION`."""

from __future__ import annotations

import argparse

from kvproxy.cli.daemon_client import (
    add_daemon_arguments,
    add_session_argument,
    as_json,
    client_from,
    session_path,
)
from kvproxy.doctor.sizes import count

NAME = "purge"
HELP = "Forget a conversation and delete its snapshots."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_session_argument(parser)
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    answer = client_from(args).delete(session_path(args.session))
    sessions, snapshots = count(answer["purged"], "conversation"), count(len(answer["deleted"]), "snapshot")
    text = f"{sessions} and {snapshots} forgotten"
    print(as_json(answer) if args.json else text)
    return 0
