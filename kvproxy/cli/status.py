"""`kvproxy status`: what the running daemon knows of its server, its slots and its savings."""

from __future__ import annotations

import argparse

from kvproxy.cli.daemon_client import Json, add_daemon_arguments, as_json, client_from
from kvproxy.cli.slots import slot_table
from kvproxy.doctor.sizes import count, human

NAME = "status"
HELP = "Show the running daemon: server, persistence, slots, totals."

_OUTCOMES = ("resident", "restored", "cold", "auxiliary", "bypass")
"""All that this version gives."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    answer = client_from(args).get("/kvproxy/status")
    print(as_json(answer) if args.json else status_text(answer))
    return 0


def status_text(status: Json) -> str:
    draining = ", shutting down" if status.get("draining") else ""
    head = f"kvproxy {status['version']}, up {_duration(status['uptime_seconds'])}{draining}"
    servers = [_server(server) for server in status["servers"]]
    return "\n\n".join([head, *servers, _totals(status)])


def _server(server: Json) -> str:
    persistence = server["persistence"]
    lines = [
        f"server {server['name']} at {server['url']}: {_with_reason(server['state'], server.get('reason'))}",
        f"  build {server['build'] or 'unknown'}, {server['model'] or 'unknown model'}",
        f"  persistence {_with_reason(persistence['mode'], persistence['reason'])}",
        f"  memory {server['memory']['kind']}, canary {server['canary'] or 'not known'}",
        f"  breaker {server['breaker']}",
        f"  {count(server.get('waiting', 0), 'request')} waiting for a slot",
    ]
    return "\n".join([*lines, slot_table(server["slots"])])


def _totals(status: Json) -> str:
    stats, kept = status["stats"], status["snapshots"]
    computed, reused = stats["prompt_tokens_computed"], stats["prompt_tokens_reused"]
    share = f" ({reused / (computed + reused):.1%})" if computed + reused else ""
    without_room = stats.get("saves_without_room", 0)
    unbegun = f", {without_room} not begun without room on the disk" if without_room else ""
    outcomes = ", ".join(f"{stats[name]} {name}" for name in _OUTCOMES)
    return "\n".join(
        [
            f"requests  {stats['requests']}: {outcomes}",
            f"prompts   {reused} tokens reused{share}, {computed} computed",
            f"saves     {stats['saves']}, {stats['save_failures']} failed{unbegun}",
            f"restores  {stats['restores']}, {stats['restore_failures']} failed, "
            f"{stats['ineffective_restores']} without effect",
            f"snapshots {kept['valid']} valid, {kept['invalid']} invalid, {human(kept['bytes'])}",
        ]
    )


def _with_reason(state: str, reason: str | None) -> str:
    return f"{state} ({reason})" if reason else state


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
