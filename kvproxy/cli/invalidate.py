"""`kvproxy invalidate SESSION`."""

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

NAME = "invalidate"
HELP = "Mark a conversation's snapshots as not to be restored; the files stay."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_session_argument(parser)
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    answer = client_from(args).post(session_path(args.session, "invalidate"))
    print(
        as_json(answer) if args.json else f"{count(answer['invalidated'], 'snapshot')} will not be restored"
    )
    return 0
