"""Telling an operator what is wrong with the settings: one line each, `key: value: reason`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvproxy.errors import SettingsError
from kvproxy.settings.model import MASK, SECRETS, Section, Settings

_MAX_SHOWN = 80
_SECRETIVE = re.compile(r"key|token|secret|pass", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"//[^/@\s]*@")


@dataclass(frozen=True, slots=True)
class Problem:
    """`value` is the one that was given; it is shown shortened, a secret one not at all."""

    key: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.key, self.value)}: {self.reason}"


def error_of(problems: Iterable[Problem]) -> SettingsError:
    return SettingsError("\n".join(str(problem) for problem in problems))


def _shown(key: str, value: object) -> str:
    if value is None:
        return "null"
    names = set(key.split("."))
    if names & SECRETS or (not names <= _all_names() and _SECRETIVE.search(key)):
        return MASK
    text = " ".join(_PASSWORD_IN_URL.sub(f"//{MASK}@", _written(value)).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _written(value: object) -> str:
    """A list or mapping that holds more than plain values may hold a secret: only its kind is told."""
    if isinstance(value, Mapping | Section):
        return "a mapping"
    if isinstance(value, Sequence) and not isinstance(value, str):
        plain = all(isinstance(entry, str | int | float) for entry in value)
        return json.dumps(list(value)) if plain else "a list"
    return json.dumps(value) if isinstance(value, bool | int | float) else str(value)


def from_validation(error: ValidationError) -> tuple[Problem, ...]:
    """One problem for each key, however many alternatives of its type refused it."""
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        key = _key(detail["loc"], keep_last=detail["type"] == "extra_forbidden")
        reason = _reason(detail, key)
        earlier = found.get(key)
        if earlier is None:
            found[key] = Problem(key, detail["input"], reason)
        elif reason not in earlier.reason:
            found[key] = Problem(key, earlier.value, f"{earlier.reason}, or {reason}")
    return tuple(problem for key, problem in found.items() if not _has_inner(found, key))


def _has_inner(keys: Iterable[str], key: str) -> bool:
    """A list is refused as a whole once an entry of it was; the entry alone is worth telling."""
    return any(other.startswith(f"{key}.") for other in keys)


def _key(location: tuple[int | str, ...], *, keep_last: bool) -> str:
    """The dotted key, without the names that pydantic gives to the alternatives of a type."""
    known, parts = _all_names(), [str(part) for part in location]
    last = parts[-1:] if keep_last else []
    return ".".join([part for part in parts[: len(parts) - len(last)] if part in known] + last)


def _reason(detail: ErrorDetails, key: str) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_reason(key)
        case "tuple_type":
            return "should be a list"
        case "model_type":
            return "should be a mapping"
        case "is_instance_of":
            return "should be a path"  # the one class of values that is no plain type
        case "too_short":
            return "should have at least one entry"
        case "int_type" | "float_type" | "bool_type" if isinstance(detail["input"], str):
            return f"{_in_our_words(detail)}, and is text"  # as "3" in quotes, which looks like one here
        case _:
            return _in_our_words(detail)


def _in_our_words(detail: ErrorDetails) -> str:
    return detail["msg"].removeprefix("Value error, ").replace("Input should be", "should be")


def _unknown_reason(key: str) -> str:
    nearest = _nearest(key)
    return f"unknown setting; did you mean {nearest}?" if nearest else "unknown setting"


def _nearest(key: str) -> str | None:
    """The known key most like this one: the one of that last name, else by the whole, else by last name."""
    last = key.rpartition(".")[2]
    by_name = {known.rpartition(".")[2]: known for known in keys()}
    if last in by_name:
        return by_name[last]
    generic = re.sub(r"\.\d+\.", ".*.", key)
    others = [known for known in keys() if known != generic.rpartition(".")[0]]
    whole = difflib.get_close_matches(generic, others, n=1, cutoff=0.75)
    close = difflib.get_close_matches(last, by_name, n=1, cutoff=0.75)
    return whole[0] if whole else (by_name[close[0]] if close else None)


def keys() -> tuple[str, ...]:
    """Every setting's dotted key and every section's; `*` stands for the entries of a list."""
    return tuple(_keys_of(Settings, ""))


def _keys_of(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        inner: Any = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from _keys_of(inner, f"{prefix}{name}.")
        elif (
            (entries := get_args(inner)) and isinstance(entries[0], type) and issubclass(entries[0], Section)
        ):
            yield from _keys_of(entries[0], f"{prefix}{name}.*.")


def _all_names() -> set[str]:
    return {part for key in keys() for part in key.split(".")} | {str(index) for index in range(100)}
