"""`kvproxy serve`: the daemon."""

from __future__ import annotations

import argparse

from kvproxy.cli.settings_arguments import add_settings_arguments, settings_from
from kvproxy.daemon import run as serve

NAME = "serve"
HELP = "Run the proxy. Without any argument it fronts http://127.0.0.1:8080 on 127.0.0.1:8090."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return serve(settings_from(args))
