"""Reads the wordings of side calls: those that come with kvproxy, and those of the operator."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from kvproxy.auxiliary.fingerprints import Fingerprint
from kvproxy.errors import SettingsError

KEY = "auxiliary.fingerprints"
_ENTRIES = TypeAdapter(list[Fingerprint])


def packaged() -> tuple[Fingerprint, ...]:
    text = resources.files("kvproxy.auxiliary").joinpath("fingerprints.yaml").read_text("utf-8")
    return tuple(_ENTRIES.validate_python(yaml.safe_load(text)))


def read(path: Path) -> tuple[Fingerprint, ...]:
    """Those of the operator's file. Raises SettingsError that names file, entry and reason."""
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise _error(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise _error(path, "is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise _error(path, f"line {mark.line + 1} is not YAML" if mark else "is not YAML") from None
    try:
        return tuple(_ENTRIES.validate_python(document if document is not None else []))
    except ValidationError as error:
        raise _error(path, _told(error)) from None


def load(path: Path | None) -> tuple[Fingerprint, ...]:
    """All of them, the operator's first. Raises SettingsError."""
    return (*(() if path is None else read(path)), *packaged())


def _told(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return "should be a list of entries with client, where, and starts or contains"
    number, *names = first["loc"]
    where = ".".join(str(name) for name in names)
    reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
    return f"entry {int(number) + 1}{f', {where}' if where else ''}: {reason}"


def _error(path: Path, reason: str) -> SettingsError:
    return SettingsError(f"{KEY}: {path}: {reason}")
