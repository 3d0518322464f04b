"""Which generations go when there are too many, too large or too old."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvproxy.identifiers import SessionKey, SnapshotName
from kvproxy.snapshots.manifest import Generation, Manifest


class ExpiredBy(StrEnum):
    """The limit that a generation fell to."""

    AGE = "age"
    BYTES = "bytes"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Expired:
    key: SessionKey
    name: SnapshotName
    size_bytes: int
    by: ExpiredBy


def choose_expired(
    manifests: Iterable[Manifest],
    *,
    max_total_bytes: int,
    max_snapshots: int,
    max_age_seconds: float | None,
    now: float,
    in_use: Collection[SnapshotName],
) -> tuple[Expired, ...]:
    """What to forget and delete, in this order. `now` is Unix seconds; a snapshot is one generation.

    1. Older than `max_age_seconds` since the session was last used.
    2. While a limit is passed: invalid generations, then previous ones, oldest first, then current ones,
       least recently used first.

    What is in use stays, and still counts.
    """
    held = [(manifest, one) for manifest in manifests for one in manifest.generations]
    count, size = len(held), sum(one.size_bytes for _, one in held)
    oldest = float("-inf") if max_age_seconds is None else now - max_age_seconds
    expired: list[Expired] = []
    for manifest, one in sorted(held, key=lambda pair: (pair[0].last_used_at >= oldest, *_rank(*pair))):
        by = _limit_passed(manifest.last_used_at < oldest, size > max_total_bytes, count > max_snapshots)
        if by is None or one.name in in_use:
            continue
        expired.append(Expired(manifest.key, one.name, one.size_bytes, by))
        count, size = count - 1, size - one.size_bytes
    return tuple(expired)


def _rank(manifest: Manifest, one: Generation) -> tuple[int, float]:
    if not one.is_valid:
        return (0, one.saved_at)
    if one is not manifest.current and manifest.current.is_valid:
        return (1, one.saved_at)
    return (2, manifest.last_used_at)


def _limit_passed(is_old: bool, is_large: bool, is_many: bool) -> ExpiredBy | None:
    if is_old:
        return ExpiredBy.AGE
    if is_large:
        return ExpiredBy.BYTES
    return ExpiredBy.COUNT if is_many else None
