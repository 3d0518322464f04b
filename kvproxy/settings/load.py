"""From file, environment and flags to `Settings`; each later source wins."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvproxy.auxiliary.library import read as read_fingerprints
from kvproxy.settings.model import Settings
from kvproxy.settings.overrides import Override, apply, from_environment
from kvproxy.settings.problems import Problem, error_of, from_validation
from kvproxy.settings.unbuilt import refused


def load(
    path: Path | None = None, *, environ: Mapping[str, str], overrides: Sequence[Override] = ()
) -> Settings:
    """The settings in force. Raises SettingsError with one line for each thing that is wrong."""
    return resolve(read(path) if path else {}, environ=environ, overrides=overrides)


def read(path: Path) -> dict[str, Any]:
    """The settings file as it is written. Raises SettingsError if it cannot be read."""
    try:
        document = yaml.load(path.read_text("utf-8"), Loader=_NoDuplicates)
    except OSError as error:
        raise error_of([Problem("--config", str(path), error.strerror or str(error))]) from None
    except UnicodeDecodeError:
        raise error_of([Problem("--config", str(path), "is not UTF-8 text")]) from None
    except yaml.YAMLError as error:
        raise error_of([Problem("--config", str(path), _one_line(error))]) from None
    if document is not None and not isinstance(document, dict):
        raise error_of([Problem("--config", str(path), "should hold sections, like server: and upstreams:")])
    return document or {}


def resolve(
    document: Mapping[str, Any], *, environ: Mapping[str, str], overrides: Sequence[Override] = ()
) -> Settings:
    """`document` is the settings file as a mapping; a section without content counts as absent."""
    merged = {key: deepcopy(value) for key, value in document.items() if value is not None}
    misplaced = [
        Problem(override.source, override.text, reason)
        for override, reason in apply(merged, [*from_environment(environ), *overrides])
    ]
    if misplaced:
        raise error_of(misplaced)
    if merged.get("state_dir") is None:
        merged["state_dir"] = default_state_dir(environ)
    settings = _validate(merged)
    if settings.auxiliary.fingerprints is not None:
        read_fingerprints(settings.auxiliary.fingerprints)  # better refused now than when it is needed
    if unbuilt := refused(settings):
        raise error_of(Problem(entry.key, entry.value, entry.reason) for entry in unbuilt)
    return settings


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """`${XDG_STATE_HOME:-~/.local/state}/kvproxy`. Raises SettingsError if there is no home directory."""
    base = environ.get("XDG_STATE_HOME", "")
    if base.startswith("/"):  # the XDG specification wants a relative one ignored
        return Path(base) / "kvproxy"
    try:
        home = Path(environ.get("HOME") or Path.home())
    except RuntimeError:
        raise error_of([Problem("state_dir", None, "there is no home directory; name one")]) from None
    return home / ".local" / "state" / "kvproxy"


def _validate(document: Mapping[str, Any]) -> Settings:
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        raise error_of(from_validation(error)) from None


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or "is not readable as YAML"
    return f"line {mark.line + 1}: {reason}" if mark else str(reason)


class _NoDuplicates(yaml.SafeLoader):
    """A key written twice is an error: YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = getattr(key, "value", None)
            if isinstance(name, str) and name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{name} is written twice", key.start_mark
                )
            seen.add(str(name))
        return super().construct_mapping(node, deep=deep)
