"""Side calls by their wording: pure. Clients change it with any release, so the wording is data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from kvproxy.dialects.canonical import text_of
from kvproxy.dialects.reading import Reading

LOOKED_AT_CHARS = 8192
"""Of each text: instructions come first."""

Phrase = Annotated[str, Field(min_length=8, max_length=1000)]
"""Shorter ones would be met in any conversation."""


class Fingerprint(BaseModel):
    """One wording. `where` it stands: in the system prompt, in the user's only message, or in the user's last
    one. `max_tokens` is the most that such a request asks for, None if that does not matter."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    client: Annotated[str, Field(min_length=1, max_length=100)]
    where: Literal["system", "only_user", "last_user"]
    starts: Phrase | None = None
    contains: Annotated[tuple[Phrase, ...], Strict(False)] = ()
    max_tokens: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.starts is None and not self.contains:
            raise ValueError("should have starts or contains")
        return self


class Texts:
    """The texts of one request that wordings are looked for in, each taken out when it is first asked for."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._known: dict[str, str] = {}

    def of(self, where: str) -> str:
        """Empty where there is no such text."""
        if where not in self._known:
            self._known[where] = _TAKE[where](self._reading).lstrip()[:LOOKED_AT_CHARS]
        return self._known[where]


def _only_user(reading: Reading) -> str:
    """Where nothing but the user speaks."""
    others = {"assistant", "tool"} & set(reading.roles)
    texts = () if others else reading.user_texts
    return texts[0] if len(texts) == 1 else ""


def _last_user(reading: Reading) -> str:
    """Looked for from the end: the other messages may be many, and their texts long."""
    said = (text_of(one.get("content")) for one in reversed(reading.messages) if one.get("role") == "user")
    return next((text for text in said if text), "")


_TAKE: Mapping[str, Callable[[Reading], str]] = {
    "system": lambda reading: reading.system_text,
    "only_user": _only_user,
    "last_user": _last_user,
}


class Library:
    """Wordings in the order in which they count. Sorted by where they stand, for each request is held against
    all of them, and most have no text there, or none that begins so."""

    def __init__(self, fingerprints: Iterable[Fingerprint] = ()) -> None:
        self._all = tuple(fingerprints)
        self._by_place = {where: [one for one in self._all if one.where == where] for where in _TAKE}
        self._starts = {
            where: tuple(one.starts for one in ones if one.starts is not None)
            for where, ones in self._by_place.items()
        }

    def find(self, reading: Reading) -> Fingerprint | None:
        """The first that fits."""
        texts = Texts(reading)
        fits = [one for where in _TAKE for one in self._fitting(where, texts.of(where), reading)]
        return min(fits, key=self._all.index) if fits else None

    def _fitting(self, where: str, text: str, reading: Reading) -> list[Fingerprint]:
        if not text:
            return []
        begins = text.startswith(self._starts[where])
        candidates = self._by_place[where]
        return [one for one in candidates if (begins or one.starts is None) and _fits(one, text, reading)]

    def __len__(self) -> int:
        return len(self._all)


def _fits(one: Fingerprint, text: str, reading: Reading) -> bool:
    if one.max_tokens is not None and (reading.max_tokens is None or reading.max_tokens > one.max_tokens):
        return False
    if one.starts is not None and not text.startswith(one.starts):
        return False
    return all(phrase in text for phrase in one.contains)
