"""Laying environment variables and flags over the settings file.

A text setting takes the value as it is written, so that a key of digits stays a key; every other
setting reads it as YAML. `null` unsets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import yaml

from kvproxy.settings.model import Section, Settings

PREFIX = "KVPROXY_"
_NULLS = frozenset({"", "null", "~"})

# Kubernetes sets these in every pod beside a service named "kvproxy"; KVPROXY_TEST_* belong to the tests.
_FOREIGN = re.compile(r"KVPROXY_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_(TCP|UDP)\w*)?|TEST_\w+)")


@dataclass(frozen=True, slots=True)
class Override:
    """`source` is what the operator wrote: a variable's name or a flag."""

    path: tuple[str, ...]
    text: str
    source: str


def from_environment(environ: Mapping[str, str]) -> tuple[Override, ...]:
    """`KVPROXY_SECTION__KEY` as overrides: sections before their keys, list entries in order."""
    found = [
        Override(tuple(name.removeprefix(PREFIX).lower().split("__")), text, name)
        for name, text in environ.items()
        if name.startswith(PREFIX) and not _FOREIGN.fullmatch(name)
    ]
    return tuple(
        sorted(found, key=lambda o: [(len(part), part) if part.isdigit() else (0, part) for part in o.path])
    )


def from_assignment(text: str) -> Override:
    """`a.b=VALUE`. Raises ValueError if there is no equals sign or no key."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError("should be a.b=VALUE")
    return Override(tuple(key.strip().split(".")), value, f"--set {key.strip()}")


def apply(document: dict[str, Any], overrides: Sequence[Override]) -> Iterator[tuple[Override, str]]:
    """Write each override into `document`; yields those that cannot be, with the reason."""
    for override in overrides:
        try:
            _put(document, override.path, _value(override))
        except ValueError as error:
            yield override, str(error)


def _put(target: Any, path: tuple[str, ...], value: object) -> None:
    """Walks down to the last key, making what is missing on the way."""
    key = path[0]
    if isinstance(target, list):
        if not key.isdigit() or int(key) > len(target):
            raise ValueError(f"the list has {len(target)} entries, so the next is {len(target)}")
        if int(key) == len(target):
            target.append({})
        if len(path) == 1:
            target[int(key)] = value
        else:
            _put(target[int(key)], path[1:], value)
    elif isinstance(target, dict):
        if len(path) == 1:
            target[key] = value
            return
        if target.get(key) is None:
            target[key] = [] if path[1].isdigit() else {}
        _put(target[key], path[1:], value)
    else:
        raise ValueError("lies below a plain value")


def _value(override: Override) -> object:
    text = override.text
    if _is_text(override.path):
        return None if text in _NULLS else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError("is not readable as YAML") from None


def _is_text(path: tuple[str, ...]) -> bool:
    """Whether the setting at `path` takes its value as written. False for one that does not exist."""
    kinds = _kinds(_annotation(path))
    return bool(kinds) and not kinds & {bool, int, float, tuple}


def _annotation(path: tuple[str, ...]) -> Any:
    kind: Any = Settings
    for part in path:
        if isinstance(kind, type) and issubclass(kind, Section):
            field = kind.model_fields.get(part)
            kind = field.annotation if field else None
        elif get_origin(kind) is tuple and part.isdigit():
            kind = get_args(kind)[0]
        else:
            return None
    return kind


def _kinds(annotation: Any) -> set[Any]:
    """The bare types of an annotation; empty for a section and for nothing."""
    if annotation is None or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return set()
    origin = get_origin(annotation)
    if origin is tuple:
        return {tuple}
    if origin is None:
        return {annotation}
    if hasattr(annotation, "__metadata__"):
        return _kinds(get_args(annotation)[0])
    args = [a for a in get_args(annotation) if a is not type(None)]
    inner = [_kinds(a) if isinstance(a, type) or get_origin(a) else {type(a)} for a in args]
    return set().union(*inner)
