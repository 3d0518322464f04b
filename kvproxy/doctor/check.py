"""What an examination finds: a list of checks, and the one word they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    """How one check ended."""

    OK = "ok"
    SKIPPED = "skipped"
    """Not looked at, and that says nothing against the server: not asked for, or it does not apply."""
    DEGRADED = "degraded"
    """kvproxy serves, but conversations are not known to survive."""
    UNUSABLE = "unusable"
    """kvproxy cannot serve, or cannot start."""


class Readiness(StrEnum):
    """The whole of it."""

    READY = "ready"
    DEGRADED = "degraded"
    UNUSABLE = "unusable"

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self]


_EXIT_CODES = {Readiness.READY: 0, Readiness.DEGRADED: 1, Readiness.UNUSABLE: 2}


@dataclass(frozen=True, slots=True)
class Change:
    """What to change (a flag of llama-server or a setting of ours, as one would type it), and why."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    result: Result
    detail: str
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Checks in the order they were made."""

    checks: tuple[Check, ...]
    is_proven: bool = False
    """Whether a conversation was really saved, restored and reused."""

    @property
    def readiness(self) -> Readiness:
        results = {check.result for check in self.checks}
        if Result.UNUSABLE in results:
            return Readiness.UNUSABLE
        return Readiness.DEGRADED if Result.DEGRADED in results else Readiness.READY

    @property
    def verdict(self) -> str:
        """One line: the word, and the worst finding or what was proven."""
        readiness = self.readiness
        if readiness is Readiness.READY:
            proof = "proven on this server" if self.is_proven else "as far as can be told without the probe"
            return f"{readiness}: conversations are saved and restored, {proof}"
        worst = next(check for check in self.checks if check.result == readiness.value)
        return f"{readiness}: {worst.name}: {worst.detail}"

    @property
    def changes(self) -> tuple[Change, ...]:
        """Each once, in the order of the checks."""
        return tuple(dict.fromkeys(change for check in self.checks for change in check.changes))


def passed(name: str, detail: str) -> Check:
    return Check(name, Result.OK, detail)


def skipped(name: str, detail: str) -> Check:
    return Check(name, Result.SKIPPED, detail)


def degraded(name: str, detail: str, *changes: Change) -> Check:
    return Check(name, Result.DEGRADED, detail, changes)


def unusable(name: str, detail: str, *changes: Change) -> Check:
    return Check(name, Result.UNUSABLE, detail, changes)


def blocks(checks: Iterable[Check]) -> bool:
    """Whether something was found after which the rest cannot be looked at."""
    return any(check.result is Result.UNUSABLE for check in checks)
