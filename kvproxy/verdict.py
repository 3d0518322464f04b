"""What an operator is told at start: will conversations survive here, and if not, what to change."""

from __future__ import annotations

import logging
from typing import Protocol

from kvproxy.doctor.sizes import count, human
from kvproxy.settings.model import Settings
from kvproxy.snapshots.store import SnapshotStore
from kvproxy.upstream.facts import Facts, Standing, why_without_slots


class Known(Protocol):
    """What the verdict is made of."""

    @property
    def settings(self) -> Settings: ...
    @property
    def standing(self) -> Standing: ...
    @property
    def store(self) -> SnapshotStore: ...


def verdict_line(known: Known, snapshot_dir_fault: str | None = None) -> tuple[int, str]:
    """The log level and the line. `snapshot_dir_fault` says why that directory cannot be used, if so."""
    facts = known.standing.facts
    upstream = known.settings.upstreams[0]
    if not facts.state.has_slots:
        return logging.WARNING, why_without_slots(upstream.url, facts)
    if facts.props is None:
        return logging.WARNING, f"{why_without_slots(upstream.url, facts)}; conversations do not survive"
    head = f"{count(facts.slots, 'slot')}, {facts.model or 'unknown model'}"
    if not facts.persistence.is_on:
        was_told = facts.persistence.reason == known.standing.obstacle
        level = logging.INFO if was_told else logging.WARNING
        return level, f"{head}: conversations do not survive: {facts.persistence.reason}"
    if snapshot_dir_fault is not None:
        fault = f"snapshot_dir cannot be used: {snapshot_dir_fault}"
        return logging.WARNING, f"{head}: conversations do not survive: {fault}"
    line = f"{head}: conversations are saved and restored; {_size(known, facts)}"
    if 0 < facts.slots <= upstream.set_apart:
        told = f"upstreams[].auxiliary_slots is {upstream.set_apart}, and one slot is left to conversations"
        return logging.WARNING, f"{line}; {told}"
    return logging.INFO, line


def _size(known: Known, facts: Facts) -> str:
    """How a full slot compares with the quota, learned from what was saved of this model."""
    quota = known.settings.retention.max_total_bytes
    saved = [
        one
        for manifest in known.store.all()
        if manifest.fingerprint == facts.fingerprint
        for one in manifest.generations
    ]
    if not saved or facts.n_ctx is None:
        return f"the size of a full slot is known after the first save (quota {human(quota)})"
    largest = max(saved, key=lambda one: one.tokens)
    full = int(largest.size_bytes / largest.tokens * facts.n_ctx)
    warning = "" if full * 2 <= quota else ", which holds less than two generations of it"
    return f"a full slot takes {human(full)} of a quota of {human(quota)}{warning}"
