"""`kvproxy doctor`: proves that conversations survive on this server, or names what to change."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from kvproxy.cli.settings_arguments import add_settings_arguments, settings_from
from kvproxy.cli.table import table
from kvproxy.doctor.check import Report
from kvproxy.doctor.examine import examine

NAME = "doctor"
HELP = (
    "Prove that conversations survive on this llama-server, or name the flag to change. Meant for an idle "
    "server: the probe puts 700 tokens through a slot that is idle and empty, saves, erases and restores it. "
    "Exit 0 ready, 1 degraded, 2 unusable."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings_arguments(parser)
    parser.add_argument("--no-probe", action="store_true", help="only ask; touch no slot, write no snapshot")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    report = asyncio.run(examine(settings_from(args), wants_probe=not args.no_probe))
    print(json.dumps(as_data(report), indent=1, ensure_ascii=False) if args.json else as_text(report))
    return report.readiness.exit_code


def as_text(report: Report) -> str:
    rows = [(check.name, check.result, check.detail) for check in report.checks]
    changes = [f"change  {change.what}\n        {change.reason}" for change in report.changes]
    return "\n".join([table(("CHECK", "RESULT", "DETAIL"), rows), "", report.verdict, *changes])


def as_data(report: Report) -> dict[str, Any]:
    return {
        "readiness": report.readiness,
        "exit_code": report.readiness.exit_code,
        "verdict": report.verdict,
        "proven": report.is_proven,
        "checks": [{"name": c.name, "result": c.result, "detail": c.detail} for c in report.checks],
        "changes": [{"change": change.what, "reason": change.reason} for change in report.changes],
    }
