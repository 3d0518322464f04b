"""`kvproxy snapshots`: what lies on disk."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from kvproxy.cli.daemon_client import Json, add_daemon_arguments, as_json, client_from
from kvproxy.cli.table import table

NAME = "snapshots"
HELP = "List the snapshots: session, tokens, bytes, time, valid or not."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    answer = client_from(args).get("/kvproxy/snapshots")
    print(as_json(answer) if args.json else snapshot_table(answer["snapshots"]))
    return 0


def snapshot_table(snapshots: list[Json]) -> str:
    head = ("SESSION", "NAME", "TOKENS", "BYTES", "SAVED (UTC)", "VALID", "REASON")
    return table(head, [_row(snapshot, one) for snapshot in snapshots for one in snapshot["generations"]])


def _row(snapshot: Json, one: Json) -> list[object]:
    saved = datetime.fromtimestamp(one["saved_at"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    return [
        snapshot["session"],
        one["name"],
        one["tokens"],
        one["bytes"],
        saved,
        one["valid"],
        one["invalid_reason"],
    ]
