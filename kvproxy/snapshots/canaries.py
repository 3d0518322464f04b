"""The canaries seen so far, each under a name of its own, and which life of a server gave which.

The name is one field of a fingerprint. It is made from the canary itself, so that a lost file costs nothing
where a server answers to the last bit as before; a canary that differs within the tolerance gets the name of
the one that was first.

A *life* is a process of the server and the model it runs. Its canary cannot change while it runs (adapters
can, so they are kept beside it), and it is looked up here when its slots are full and it can no longer be
asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kvproxy.snapshots.atomic import write_atomic
from kvproxy.snapshots.canary import Canary

NAME_DIGITS = 12
MOST_CANARIES = 128
MOST_LIVES = 256
MAX_FILE_BYTES = 1 << 20

LIFE = "life:"
"""Begins the name that stands in for a canary that is not known: good for one life and no other."""


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Life(_Closed):
    """`name` is made by `life_name`; `canary` is a canary's name. `is_volatile`: it was seen to clear idle
    slots, which cannot be tried out again while they hold something. `keeps_window`: whether a restored
    sliding window was seen to be reused; None if that was not tried."""

    name: str
    adapters: str
    canary: str
    is_volatile: bool = False
    keeps_window: bool | None = None


class _Kept(_Closed):
    name: str
    logprobs: dict[str, float]


class _File(_Closed):
    """The newest last, in both."""

    schema_version: Literal[1]
    canaries: list[_Kept]
    lives: list[Life]


SCHEMA_VERSION: Final = 1


def life_name(marker: str, *model: str) -> str:
    """`marker` is what `/props` shows and each process makes anew; `model` is which one it runs, of several
    that one process may serve in turn."""
    return _digits("\n".join((marker, *model)))


def stand_in(life: str) -> str:
    """The fingerprint's field while the canary of `life` is not known."""
    return LIFE + life


class Canaries:
    """`path` None keeps them for as long as this object lives."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._canaries: dict[str, Canary] = {}
        self._lives: dict[str, Life] = {}
        self._writing = asyncio.Lock()

    async def load(self) -> str | None:
        """Read what was kept; a complaint if there is something else in its place."""
        if self._path is None:
            return None
        try:
            data = await asyncio.to_thread(_read, self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"cannot read {self._path}: {error.strerror or error}"
        try:
            self._take(_File.model_validate_json(data))
        except (ValidationError, ValueError):
            # It is learned anew from the servers; at worst snapshots of full, living ones stay unused.
            return f"{self._path} is not a list of canaries and will be written anew"
        return None

    def life(self, name: str) -> Life | None:
        return self._lives.get(name)

    def canary(self, field: str) -> Canary | None:
        """The canary that a fingerprint's field stands for, also where it was not known at the time."""
        if field.startswith(LIFE):
            life = self._lives.get(field.removeprefix(LIFE))
            field = life.canary if life else ""
        return self._canaries.get(field)

    def name(self, canary: Canary) -> str:
        """Of the nearest one known within the tolerance, else a new one."""
        near = sorted((canary.difference(known), name) for name, known in self._canaries.items())
        if near and canary.matches(self._canaries[near[0][1]]):
            return near[0][1]
        return _digits(json.dumps(canary.as_dict()))

    async def found_volatile(self, name: str) -> str | None:
        """Keep that a life known by its canary clears idle slots; a complaint if that cannot be written."""
        life = self._lives.get(name)
        if life is None or life.is_volatile:
            return None
        self._lives[name] = life.model_copy(update={"is_volatile": True})
        return await self._write()

    async def remember(self, canary: Canary, life: str | None, adapters: str) -> str | None:
        """Keep a canary that was just given; a complaint if that cannot be written."""
        name = self.name(canary)
        self._canaries[name] = self._canaries.pop(name, canary)
        if life is not None:
            before = self._lives.pop(life, None)
            now = before or Life(name=life, adapters=adapters, canary=name)
            self._lives[life] = now.model_copy(update={"adapters": adapters, "canary": name})
        _drop_oldest(self._canaries, MOST_CANARIES)
        _drop_oldest(self._lives, MOST_LIVES)
        return await self._write()

    async def remember_window(self, life: str, keeps_window: bool) -> str | None:
        """Keep what was seen of a sliding window in a life that is known; a complaint if that cannot be
        written."""
        known = self._lives.get(life)
        if known is None or known.keeps_window is keeps_window:
            return None
        self._lives[life] = known.model_copy(update={"keeps_window": keeps_window})
        return await self._write()

    async def _write(self) -> str | None:
        if self._path is None:
            return None
        async with self._writing:
            data = self._encoded()
            try:
                await asyncio.to_thread(write_atomic, self._path, data)
            except OSError as error:
                return f"cannot write {self._path}: {error.strerror or error}"
        return None

    def _encoded(self) -> bytes:
        kept = [_Kept(name=name, logprobs=one.as_dict()) for name, one in self._canaries.items()]
        lives = list(self._lives.values())
        file = _File(schema_version=SCHEMA_VERSION, canaries=kept, lives=lives)
        return file.model_dump_json(indent=1).encode() + b"\n"

    def _take(self, file: _File) -> None:
        self._canaries = {one.name: Canary.from_dict(one.logprobs) for one in file.canaries}
        self._lives = {one.name: one for one in file.lives}


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES)


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:NAME_DIGITS]


def _drop_oldest(kept: dict[str, Canary] | dict[str, Life], most: int) -> None:
    for name in list(kept)[: max(0, len(kept) - most)]:
        del kept[name]
