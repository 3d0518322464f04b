"""`kvproxy save SESSION`."""

from __future__ import annotations

import argparse

from kvproxy.cli.daemon_client import (
    Json,
    add_daemon_arguments,
    add_session_argument,
    as_json,
    client_from,
    session_path,
)

NAME = "save"
HELP = "Save a conversation now, waiting for its request to end."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_session_argument(parser)
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 if it could not be saved: what the daemon calls no failure may still leave it unsaved."""
    answer = client_from(args).post(session_path(args.session, "save"))
    print(as_json(answer) if args.json else "\n".join(save_line(save) for save in answer["saves"]))
    return 0 if all(save["outcome"] in DONE for save in answer["saves"]) else 1


DONE = ("published", "clean")


def save_line(save: Json) -> str:
    if save["outcome"] == "published":
        return f"saved: {save['tokens']} tokens, {save['size_bytes']} bytes"
    if save["outcome"] == "clean":
        return "nothing to save: what is on disk is the newest, or the conversation is in no slot"
    detail = f": {save['detail']}" if save["detail"] else ""
    return f"not saved: {save['outcome'].replace('_', ' ')}{detail}"
