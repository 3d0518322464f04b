"""Which snapshots of a session may be restored on the server as it is now."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.checkpoint.outcome import RestoreOutcome
from kvproxy.identifiers import SessionKey
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.canaries import Canaries
from kvproxy.snapshots.compatibility import Compatible, Differs, Identity, compare
from kvproxy.snapshots.fingerprint import CANARY_FIELD, Fingerprint
from kvproxy.snapshots.manifest import Generation, Manifest, generation_to_restore
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.store import SnapshotStore
from kvproxy.upstream.facts import Facts

REFUSED_BUILD = "build: the server refused a snapshot of it"


@dataclass(frozen=True, slots=True)
class Candidates:
    """`manifests` best first. If there are none, `outcome` and `detail` say why."""

    manifests: tuple[Manifest, ...] = ()
    outcome: RestoreOutcome = RestoreOutcome.NO_SNAPSHOT
    detail: str = ""


class Chooser:
    """`accepts_other_builds`: of llama-server, where everything else agrees."""

    def __init__(self, store: SnapshotStore, canaries: Canaries, *, accepts_other_builds: bool) -> None:
        self._store = store
        self._canaries = canaries
        self._accepts_other_builds = accepts_other_builds
        self._refused: set[tuple[str, str]] = set()

    def candidates(self, key: SessionKey, present: Fingerprint) -> Candidates:
        """`present` is what the server is now."""
        found = self._store.find_any(key)
        if not found:
            return Candidates()
        verdicts = [(manifest, self.judge(manifest.fingerprint, present)) for manifest in found]
        fitting = [manifest for manifest, verdict in verdicts if isinstance(verdict, Compatible)]
        if fitting:
            return Candidates(tuple(sorted(fitting, key=lambda one: _rank(one, present), reverse=True)))
        reasons = [verdict.reason for _, verdict in verdicts if isinstance(verdict, Differs)]
        return Candidates((), RestoreOutcome.FINGERPRINT_MISMATCH, f"differs in {reasons[0]}")

    def judge(self, saved: Fingerprint, present: Fingerprint) -> Compatible | Differs:
        if saved.digest == present.digest:
            return Compatible()
        if (saved.digest, present.digest) in self._refused:
            return Differs(("build",), REFUSED_BUILD)
        return compare(*self._identities(saved, present), accept_other_builds=self._accepts_other_builds)

    def refused(self, saved: Fingerprint, present: Fingerprint) -> None:
        """The server did not take a snapshot of another build: it has another file format."""
        self._refused.add((saved.digest, present.digest))

    def _identities(self, saved: Fingerprint, present: Fingerprint) -> tuple[Identity, Identity]:
        canaries = [self._canaries.canary(one.get(CANARY_FIELD)) for one in (saved, present)]
        if None in canaries:
            # A name without its canary says whether it is the same one, and nothing more.
            return Identity(saved, canaries[0]), Identity(present, canaries[1])
        plain = [one.without(CANARY_FIELD) for one in (saved, present)]
        return Identity(plain[0], canaries[0]), Identity(plain[1], canaries[1])


def serves(generation: Generation, facts: Facts, saved: Fingerprint) -> bool:
    """Whether the server would go on from a generation as far as its sliding window is concerned. `saved` is
    what the server was when it saved it.

    An opened window is right where the same server still needs it: it is given to no other. One as the
    server wrote it is of no use to a server that was seen to reuse none.
    """
    if generation.alteration is Alteration.WINDOW_EDIT:
        is_same = facts.fingerprint is not None and facts.fingerprint.digest == saved.digest
        return is_same and facts.window.opened is not None
    return facts.kind is not MemoryKind.SLIDING_WINDOW or facts.window.is_whole is not False


def _rank(manifest: Manifest, present: Fingerprint) -> tuple[int, bool]:
    """The newest work first; of equals the one that this very server made."""
    generation = generation_to_restore(manifest)
    revision = -1 if generation is None else generation.revision
    return revision, manifest.fingerprint.digest == present.digest
