"""`kvproxy check-config`: the settings as they would be in force."""

from __future__ import annotations

import argparse

import yaml

from kvproxy.cli.settings_arguments import add_settings_arguments, settings_from

NAME = "check-config"
HELP = "Print the resolved settings as YAML, secrets masked."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings_arguments(parser)


def run(args: argparse.Namespace) -> int:
    print(yaml.safe_dump(settings_from(args).masked(), sort_keys=False, allow_unicode=True), end="")
    return 0
