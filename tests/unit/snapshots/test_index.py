from __future__ import annotations

from kvproxy.snapshots.index import SnapshotIndex, Totals
from tests.unit.snapshots.samples import (
    FINGERPRINT,
    KEY,
    OTHER_FINGERPRINT,
    OTHER_KEY,
    generation,
    manifest,
)


def index_of(*manifests: object) -> SnapshotIndex:
    index = SnapshotIndex()
    for one in manifests:
        index.put(one)  # type: ignore[arg-type]
    return index


def test_a_manifest_is_found_by_its_session_and_fingerprint_only() -> None:
    one = manifest()
    index = index_of(one)

    assert index.find(KEY, FINGERPRINT) is one
    assert index.find(KEY, OTHER_FINGERPRINT) is None
    assert index.find(OTHER_KEY, FINGERPRINT) is None


def test_a_session_keeps_one_manifest_per_fingerprint_most_recently_used_first() -> None:
    old = manifest(last_used_at=1.0)
    new = manifest(last_used_at=2.0, fingerprint=OTHER_FINGERPRINT)

    assert index_of(old, new).find_any(KEY) == (new, old)


def test_a_later_manifest_takes_the_place_of_the_earlier() -> None:
    later = manifest()

    assert list(index_of(manifest(), later)) == [later]


def test_a_file_is_found_in_either_generation() -> None:
    one = manifest(previous=generation())
    index = index_of(manifest(key=OTHER_KEY), one)
    assert one.previous is not None

    assert index.holding(one.current.name) is index.holding(one.previous.name) is one
    assert index.holding(generation().name) is None


def test_what_was_removed_leaves_nothing_behind() -> None:
    one, other = manifest(), manifest(fingerprint=OTHER_FINGERPRINT)
    index = index_of(one, other)

    index.remove(one)

    assert (list(index), index.names()) == ([other], {other.current.name})
    index.remove(other)
    index.remove(other)
    assert (list(index), index.find_any(KEY), index._by_key) == ([], (), {})


def test_totals_count_files() -> None:
    one = manifest(
        current=generation(size_bytes=10), previous=generation(size_bytes=20, invalid_reason="bad")
    )
    other = manifest(key=OTHER_KEY, current=generation(size_bytes=40))

    assert index_of(one, other).totals() == Totals(known=3, valid=2, invalid=1, size_bytes=70)
    assert SnapshotIndex().totals() == Totals(known=0, valid=0, invalid=0, size_bytes=0)
