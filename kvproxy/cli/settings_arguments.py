"""The flags by which a command is told its settings."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kvproxy.settings.load import load
from kvproxy.settings.model import Settings
from kvproxy.settings.overrides import Override, from_assignment

_FLAGS = (
    ("--upstream", "URL", "upstreams.0.url", "llama-server in front of which to stand"),
    ("--listen", "HOST:PORT", "server.listen", "where to listen"),
    ("--state-dir", "DIR", "state_dir", "manifests, lock and quarantine"),
    ("--snapshot-dir", "DIR", "upstreams.0.snapshot_dir", "the server's --slot-save-path as we see it"),
    ("--log-level", "LEVEL", "logging.level", "debug, info, warning or error"),
    ("--log-format", "FORMAT", "logging.format", "text or json"),
)


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", type=Path, help="settings file (YAML)")
    parser.set_defaults(overrides=[])
    for flag, metavar, key, text in _FLAGS:
        parser.add_argument(flag, metavar=metavar, help=text, action=_Record, const=key)
    parser.add_argument(
        "--set", metavar="a.b=VALUE", help="any setting, VALUE read as YAML; repeatable", action=_RecordAny
    )


def settings_from(args: argparse.Namespace) -> Settings:
    """File, then environment, then flags in the order they were given. Raises SettingsError."""
    return load(args.config, environ=os.environ, overrides=args.overrides)


class _Record(argparse.Action):
    """Appends an override for the key in `const`, so that the order of the flags is kept."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: object = None
    ) -> None:
        override = Override(tuple(str(self.const).split(".")), str(values), str(option))
        namespace.overrides = [*namespace.overrides, override]


class _RecordAny(argparse.Action):
    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: object = None
    ) -> None:
        try:
            override = from_assignment(str(values))
        except ValueError as error:
            raise argparse.ArgumentError(self, f"{values}: {error}") from None
        namespace.overrides = [*namespace.overrides, override]
