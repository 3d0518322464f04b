"""May a snapshot made under one identity be restored under another?

Everything must agree, but for the build: another one of the same file format may go on with a snapshot if
its canary shows that it computes the same. Wrong KV is accepted by the server and answers wrongly, without
a sign; so what cannot be compared does not agree, and costs a cold prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvproxy.snapshots.canary import TOLERANCE, Canary
from kvproxy.snapshots.fingerprint import Fingerprint

BUILD = "build"
CANARY = "canary"
FILE_VERSION = "file_version"

FAR = 1.0
"""Numerics alone move a canary less: 4-bit KV moved SmolLM2's by 0.8, a rope scale of 2 by 3.9 and other
weights tiny models' by 2 to 4. Below it anything is possible: twice the rope base moved SmolLM2's by 0.3."""

FAR_CAUSE = "the rope scale or base, an adapter or the weights are not the same"
NEAR_CAUSE = (
    "the rope base or scale, the KV type (-ctk, -ctv), flash attention (-fa), an adapter, the weights "
    "or the hardware are not the same"
)
ONE_SIDED_CAUSE = "it is not known on both sides, so nothing shows that the model computes the same"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a snapshot was made under, or what the server is now.

    `canary` is None where the server could not be asked. `file_version` is the format of the snapshot
    files, None where no file can be seen: the server refuses another one itself.
    """

    fingerprint: Fingerprint
    canary: Canary | None = None
    file_version: int | None = None


@dataclass(frozen=True, slots=True)
class Compatible:
    """`other_build`: the snapshot was made by another build of llama-server."""

    other_build: bool = False


@dataclass(frozen=True, slots=True)
class Differs:
    """`fields` that do not agree, sorted; `cause` says what is likely behind a differing canary."""

    fields: tuple[str, ...]
    cause: str = ""

    @property
    def reason(self) -> str:
        """For logs and people."""
        names = ", ".join(self.fields)
        return f"{names}: {self.cause}" if self.cause else names


def compare(
    saved: Identity, present: Identity, *, accept_other_builds: bool, tolerance: float = TOLERANCE
) -> Compatible | Differs:
    """`tolerance` is that of `Canary.matches`."""
    fields = set(saved.fingerprint.diff(present.fingerprint))
    if _versions_differ(saved.file_version, present.file_version):
        fields.add(FILE_VERSION)
    difference = _difference(saved.canary, present.canary)
    if difference is not None and difference > tolerance:
        fields.add(CANARY)
    # Without canaries nothing shows that the other build computes the same.
    computes_the_same = difference is not None and fields.isdisjoint({CANARY, FILE_VERSION})
    other_build = BUILD in fields and accept_other_builds and computes_the_same
    if other_build:
        fields.remove(BUILD)
    if fields:
        return Differs(tuple(sorted(fields)), _cause(difference) if CANARY in fields else "")
    return Compatible(other_build)


def _versions_differ(saved: int | None, present: int | None) -> bool:
    return saved is not None and present is not None and saved != present


def _difference(saved: Canary | None, present: Canary | None) -> float | None:
    """None if neither side has one: then the fingerprints alone must do, as far as they see."""
    if saved is None and present is None:
        return None
    return math.inf if saved is None or present is None else saved.difference(present)


def _cause(difference: float | None) -> str:
    if difference is None or math.isinf(difference):
        return ONE_SIDED_CAUSE
    return FAR_CAUSE if difference > FAR else NEAR_CAUSE
