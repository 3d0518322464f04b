"""Finds what to restore: the newest snapshot of a session that is whole, and of use to the server."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.checkpoint.candidates import Chooser, serves
from kvproxy.checkpoint.outcome import Restoration, RestoreOutcome
from kvproxy.checkpoint.parts import Parts
from kvproxy.identifiers import Epoch, SessionKey, SnapshotName
from kvproxy.snapshots.files import NOTHING_AGAINST_IT, FileCheck
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Generation, Manifest, generation_to_restore
from kvproxy.upstream.facts import Facts

DIVIDED_OTHERWISE = "differs in --kv-unified: the server did not take it for that"


@dataclass(frozen=True, slots=True)
class Found:
    """`fingerprint` is the snapshot's, `present` the server's, which may be another build."""

    generation: Generation
    fingerprint: Fingerprint
    present: Fingerprint


class Finder:
    """Without `verify` no file is looked at."""

    def __init__(self, parts: Parts, chooser: Chooser, *, verify: bool) -> None:
        self._p = parts
        self._chooser = chooser
        self._verify = verify
        self._passed_over: set[tuple[Epoch, SnapshotName]] = set()

    def pass_over(self, epoch: Epoch, name: SnapshotName) -> None:
        """Nothing is wrong with it, but this life of the server does not take it."""
        self._passed_over = {(life, one) for life, one in self._passed_over if life == epoch} | {
            (epoch, name)
        }

    async def find(self, key: SessionKey) -> Found | Restoration:
        """What to restore, or why there is nothing. No file is read for a session never saved."""
        facts = self._p.standing.facts
        if not facts.persistence.is_on or facts.fingerprint is None:
            return Restoration(RestoreOutcome.OFF, detail=facts.persistence.reason)
        candidates = self._chooser.candidates(key, facts.fingerprint)
        refusal = Restoration(candidates.outcome, detail=candidates.detail)
        for manifest in candidates.manifests:
            found = await self._generation_of(manifest, facts)
            if isinstance(found, Generation):
                return Found(found, manifest.fingerprint, facts.fingerprint)
            refusal = found
        return refusal

    async def _generation_of(self, manifest: Manifest, facts: Facts) -> Generation | Restoration:
        """The newest one that nothing is wrong with. Those that are found to be damaged are marked."""
        key, fingerprint, n_ctx = manifest.key, manifest.fingerprint, facts.n_ctx
        left: Manifest | None = manifest

        def is_taken(one: Generation) -> bool:
            return (self._p.table.epoch, one.name) not in self._passed_over

        def is_of_use(one: Generation) -> bool:
            return is_taken(one) and serves(one, facts, fingerprint)

        while left is not None and (generation := generation_to_restore(left, is_of_use)) is not None:
            if n_ctx is not None and generation.tokens > n_ctx:
                detail = f"{generation.tokens} tokens do not fit {n_ctx}"
                return Restoration(RestoreOutcome.DOES_NOT_FIT, detail=detail)
            check = await self._check(key, fingerprint, generation)
            if check.is_ok:
                return generation
            if check.is_out_of_sight:
                return Restoration(RestoreOutcome.STORE_FAILED, detail=check.reason)
            await self._p.store.invalidate(key, fingerprint, generation.name, check.reason)
            left = self._p.store.find(key, fingerprint)
        if left is not None and generation_to_restore(left) is not None:
            if generation_to_restore(left, is_taken) is None:
                return Restoration(RestoreOutcome.FINGERPRINT_MISMATCH, detail=DIVIDED_OTHERWISE)
            return Restoration(
                RestoreOutcome.WINDOW_SHUT, detail="this server would not go on from its window"
            )
        return Restoration(RestoreOutcome.SNAPSHOT_INVALID)

    async def _check(self, key: SessionKey, fingerprint: Fingerprint, generation: Generation) -> FileCheck:
        if not self._verify:
            return NOTHING_AGAINST_IT
        check = await self._p.files.verify_stored(generation)
        if check.is_ok and check.identity is not None and check.identity != generation.identity:
            # It was moved or touched and had to be read whole; not again the next time.
            await self._p.store.amend(key, fingerprint, generation.name, identity=check.identity)
        return check
