"""Settings that are named but not built: any value but the one in force refuses the start.

Accepting one silently would let an operator believe in a protection or a feature that is not there.
Whoever builds one deletes its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvproxy.settings.model import Section, Settings


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """`key` may hold `*` for every entry of a list; `in_force` is what the program does today."""

    key: str
    in_force: object
    reason: str


UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt("upstreams.1", None, "more than one upstream is not built yet; keep one entry"),
    Unbuilt("upstreams.*.models", ("*",), 'routing by model is not built yet; leave it at ["*"]'),
    Unbuilt("upstreams.*.slots", "all", "managing some slots only is not built yet; leave it at all"),
    Unbuilt("security.api_keys", (), "client keys are not built yet; leave it at [] and stay on loopback"),
    Unbuilt("security.cors_origins", (), "answering browsers is not built yet; leave it at []"),
    Unbuilt("admin.listen", None, "a second listener is not built yet; leave it at null"),
)


@dataclass(frozen=True, slots=True)
class Refused:
    key: str
    value: object
    reason: str


def refused(settings: Settings) -> tuple[Refused, ...]:
    """The settings that ask for something not built."""
    return tuple(
        Refused(key, value, entry.reason)
        for entry in UNBUILT
        for key, value in _values(settings, entry.key.split("."), "")
        if value != entry.in_force
    )


def _values(value: object, path: list[str], key: str) -> Iterator[tuple[str, object]]:
    """Each value that `path` reaches, with its own key; an index beyond the list reaches nothing."""
    if not path:
        yield key, value
    elif isinstance(value, tuple):
        wanted = range(len(value)) if path[0] == "*" else (int(path[0]),)
        for index in wanted:
            if index < len(value):
                yield from _values(value[index], path[1:], f"{key}.{index}")
    elif isinstance(value, Section):
        yield from _values(getattr(value, path[0]), path[1:], f"{key}.{path[0]}" if key else path[0])
