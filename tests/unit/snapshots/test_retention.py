from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from kvproxy.identifiers import SessionKey, SnapshotName
from kvproxy.snapshots.manifest import Manifest
from kvproxy.snapshots.retention import Expired, ExpiredBy, choose_expired
from tests.unit.snapshots.samples import generation, manifest

NOW = 1_000.0


def choose(
    manifests: Collection[Manifest],
    *,
    max_total_bytes: int = 10**9,
    max_snapshots: int = 10**9,
    max_age_seconds: float | None = None,
    in_use: Collection[SnapshotName] = (),
) -> tuple[Expired, ...]:
    return choose_expired(
        manifests,
        max_total_bytes=max_total_bytes,
        max_snapshots=max_snapshots,
        max_age_seconds=max_age_seconds,
        now=NOW,
        in_use=in_use,
    )


def names(expired: tuple[Expired, ...]) -> list[SnapshotName]:
    return [one.name for one in expired]


LAST_USED = manifest(last_used_at=990.0, current=generation(), previous=generation(saved_at=700.0))
LONG_UNUSED = manifest(last_used_at=500.0, current=generation(), previous=generation(saved_at=600.0))
INVALID = manifest(
    last_used_at=999.0, current=generation(invalid_reason="bad"), previous=generation(saved_at=100.0)
)
assert LAST_USED.previous is not None
assert LONG_UNUSED.previous is not None
assert INVALID.previous is not None
ORDER = [
    INVALID.current.name,
    LONG_UNUSED.previous.name,
    LAST_USED.previous.name,
    LONG_UNUSED.current.name,
    LAST_USED.current.name,
    # Its current one is invalid: this is what the session would be restored from.
    INVALID.previous.name,
]
ALL = [LAST_USED, LONG_UNUSED, INVALID]


def test_nothing_goes_within_the_limits() -> None:
    assert choose(ALL, max_total_bytes=600, max_snapshots=6, max_age_seconds=500) == ()


def test_invalid_ones_go_first_then_previous_ones_then_the_least_recently_used() -> None:
    assert names(choose(ALL, max_snapshots=0)) == ORDER


def test_no_more_go_than_the_count_asks_for() -> None:
    assert names(choose(ALL, max_snapshots=4)) == ORDER[:2]


def test_no_more_go_than_the_bytes_ask_for() -> None:
    expired = choose(ALL, max_total_bytes=399)

    assert names(expired) == ORDER[:3]
    assert {one.by for one in expired} == {ExpiredBy.BYTES}


def test_what_is_in_use_stays_and_the_next_goes_in_its_place() -> None:
    assert names(choose(ALL, max_snapshots=4, in_use={ORDER[0], ORDER[2]})) == [ORDER[1], ORDER[3]]


def test_a_session_not_used_for_too_long_goes_whatever_the_room() -> None:
    expired = choose(ALL, max_age_seconds=499)

    assert names(expired) == [ORDER[1], ORDER[3]]
    assert {one.by for one in expired} == {ExpiredBy.AGE}


def test_the_old_go_before_anything_is_taken_for_room() -> None:
    expired = choose(ALL, max_age_seconds=499, max_snapshots=4)

    assert names(expired) == [ORDER[1], ORDER[3]]


def test_an_old_session_in_use_stays() -> None:
    assert (
        choose([LONG_UNUSED], max_age_seconds=1, in_use={one.name for one in LONG_UNUSED.generations}) == ()
    )


def test_one_that_expired_is_told_with_its_session_and_size() -> None:
    (one,) = choose([manifest(current=generation(size_bytes=70))], max_snapshots=0)

    assert (one.key, one.size_bytes, one.by) == (manifest().key, 70, ExpiredBy.COUNT)


generations = st.builds(
    generation,
    size_bytes=st.integers(1, 100),
    saved_at=st.floats(0, NOW),
    invalid_reason=st.none() | st.just("bad"),
)
collections = st.lists(
    st.builds(
        manifest,
        key=st.integers(0, 9).map(lambda digit: SessionKey(str(digit) * 32)),
        current=generations,
        previous=st.none() | generations,
        last_used_at=st.floats(0, NOW),
    ),
    max_size=8,
)


@given(collections, st.integers(0, 400), st.integers(0, 8), st.none() | st.floats(0, NOW), st.randoms())
def test_afterwards_the_limits_hold_or_only_what_is_in_use_is_left(
    manifests: list[Manifest], max_bytes: int, max_count: int, max_age: float | None, random: object
) -> None:
    held = {one.name: one for each in manifests for one in each.generations}
    in_use = {name for name in held if random.random() < 0.3}  # type: ignore[attr-defined]

    expired = choose(
        manifests,
        max_total_bytes=max_bytes,
        max_snapshots=max_count,
        max_age_seconds=max_age,
        in_use=in_use,
    )

    gone = set(names(expired))
    left = held.keys() - gone
    assert not gone & in_use
    assert len(gone) == len(expired)
    is_within = len(left) <= max_count and sum(held[name].size_bytes for name in left) <= max_bytes
    assert is_within or left <= in_use
