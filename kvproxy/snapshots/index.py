"""The manifests in memory: by session, then by fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvproxy.identifiers import SessionKey, SnapshotName
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Totals:
    """A snapshot is one generation: one file."""

    known: int
    valid: int
    invalid: int
    size_bytes: int


class SnapshotIndex:
    """At most one manifest per session and fingerprint."""

    def __init__(self) -> None:
        self._by_key: dict[SessionKey, dict[str, Manifest]] = {}

    def __iter__(self) -> Iterator[Manifest]:
        return (manifest for group in self._by_key.values() for manifest in group.values())

    def find(self, key: SessionKey, fingerprint: Fingerprint) -> Manifest | None:
        return self._by_key.get(key, {}).get(fingerprint.digest)

    def find_any(self, key: SessionKey) -> tuple[Manifest, ...]:
        """All of a session, whatever the fingerprint; most recently used first."""
        group = self._by_key.get(key, {}).values()
        return tuple(sorted(group, key=lambda manifest: manifest.last_used_at, reverse=True))

    def holding(self, name: SnapshotName) -> Manifest | None:
        """The manifest that names this file."""
        return next((manifest for manifest in self if manifest.generation(name) is not None), None)

    def put(self, manifest: Manifest) -> None:
        self._by_key.setdefault(manifest.key, {})[manifest.fingerprint.digest] = manifest

    def remove(self, manifest: Manifest) -> None:
        group = self._by_key.get(manifest.key, {})
        group.pop(manifest.fingerprint.digest, None)
        if not group:
            self._by_key.pop(manifest.key, None)

    def names(self) -> set[SnapshotName]:
        return {one.name for manifest in self for one in manifest.generations}

    def totals(self) -> Totals:
        generations = [one for manifest in self for one in manifest.generations]
        valid = sum(one.is_valid for one in generations)
        size = sum(one.size_bytes for one in generations)
        return Totals(len(generations), valid, len(generations) - valid, size)
