"""`kvproxy sessions`: the conversations the daemon knows."""

from __future__ import annotations

import argparse

from kvproxy.cli.daemon_client import Json, add_daemon_arguments, as_json, client_from
from kvproxy.cli.table import table

NAME = "sessions"
HELP = "List the conversations: state, slot, requests, last outcome."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    answer = client_from(args).get("/kvproxy/sessions")
    print(as_json(answer) if args.json else session_table(answer["sessions"]))
    return 0


def session_table(sessions: list[Json]) -> str:
    head = ("SESSION", "STATE", "SLOT", "REQUESTS", "SNAPSHOTS", "LAST OUTCOME", "REASON")
    return table(head, [_row(session) for session in sessions])


def _row(session: Json) -> list[object]:
    last = session["last"] or {}
    kept = sum(len(snapshot["generations"]) for snapshot in session["snapshots"])
    return [
        *(session[field] for field in ("session", "state", "slot", "requests")),
        kept,
        last.get("outcome"),
        last.get("reason"),
    ]
