"""Side calls by their shape: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvproxy.dialects.reading import SYSTEM_ROLES, Reading

FEW_MESSAGES = 2
"""Beside system prompts. A side call that says more than that carries a conversation on."""

PROBE_TOKENS = 1
PROBE_CHARS = 64
"""`Warmup`, `count`, `quota`: nothing that a conversation could grow from."""

_SIDE_FIELDS = frozenset({"title", "tags", "follow_ups"})


@dataclass(frozen=True, slots=True)
class Habit:
    """What the turns of a conversation were seen to be like."""

    has_tools: bool = False


UNKNOWN = Habit()


def shape_of(reading: Reading, habit: Habit) -> str | None:
    """What about the request's shape marks a side call; None if nothing does."""
    if reading.label == "infill":
        return "infill"
    if habit.has_tools and not reading.has_tools and _says_little(reading):
        return "no tools"
    if _asks_for_title(reading.document):
        return "title schema"
    return "probe" if _is_probe(reading) else None


def _says_little(reading: Reading) -> bool:
    return len([role for role in reading.roles[reading.head :] if role not in SYSTEM_ROLES]) <= FEW_MESSAGES


def _is_probe(reading: Reading) -> bool:
    is_tiny = reading.max_tokens is not None and reading.max_tokens <= PROBE_TOKENS
    if not is_tiny or reading.has_tools or reading.head or len(reading.roles) != 1:
        return False
    return reading.roles[0] == "user" and len(reading.first_user_text) <= PROBE_CHARS


def _asks_for_title(document: Mapping[str, object]) -> bool:
    """Whether the answer is to be an object of one field, and that is none a conversation is held with."""
    for name in ("response_format", "output_config", "text"):
        wanted = document.get(name)
        fields = _fields(wanted) if isinstance(wanted, Mapping) else set()
        if len(fields) == 1 and fields <= _SIDE_FIELDS:
            return True
    return False


def _fields(wanted: Mapping[str, object]) -> set[object]:
    """The fields of the JSON schema that an answer is to have, by any of the ways to ask for one."""
    inner = wanted.get("format", wanted)
    for name in ("json_schema", "schema"):
        if isinstance(inner, Mapping) and isinstance(inner.get(name), Mapping):
            inner = inner[name]
    properties = inner.get("properties") if isinstance(inner, Mapping) else None
    return set(properties) if isinstance(properties, Mapping) else set()
