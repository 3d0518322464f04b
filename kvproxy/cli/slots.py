"""`kvproxy slots`: who is in which slot."""

from __future__ import annotations

import argparse

from kvproxy.cli.daemon_client import Json, add_daemon_arguments, as_json, client_from
from kvproxy.cli.table import table

NAME = "slots"
HELP = "List the slots: state, occupant, unsaved or not, tokens."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    answer = client_from(args).get("/kvproxy/slots")
    print(as_json(answer) if args.json else slot_table(answer["slots"]))
    return 0


def slot_table(slots: list[Json]) -> str:
    head = ("SLOT", "STATE", "SESSION", "DIRTY", "TOKENS", "IDLE S")
    fields = ("id", "state", "occupant", "dirty", "tokens", "idle_seconds")
    return table(head, [[slot[field] for field in fields] for slot in slots])
