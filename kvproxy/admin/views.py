"""What the operator's face shows, as plain values. Names are the contract's."""

from __future__ import annotations

from typing import Any

from kvproxy.identifiers import ServerName, short
from kvproxy.sessions.session import Session, state_of
from kvproxy.slots.slot import SlotView
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Generation, Manifest
from kvproxy.upstream.breaker import BreakerState
from kvproxy.upstream.facts import Facts, ServerState

Json = dict[str, Any]


def slot_view(view: SlotView, now: float) -> Json:
    """`now` is monotonic seconds."""
    stay = view.occupancy
    return {
        "id": view.id,
        "state": view.state,
        "occupant": short(stay.session) if stay else None,
        "dirty": view.is_dirty,
        "leased": view.is_leased,
        "revision": stay.revision if stay else None,
        "checkpointed_revision": stay.checkpointed_revision if stay else None,
        "tokens": stay.tokens if stay else None,
        "idle_seconds": round(now - view.last_used, 3),
    }


def server_view(
    name: ServerName,
    url: str,
    epoch: int,
    facts: Facts,
    breaker: BreakerState,
    slots: list[Json],
    waiting: int,
    lack: str = "",
) -> Json:
    """`lack` is why nothing is saved for want of room on the disk, if so."""
    state, reason = state_view(facts, lack)
    persistence = facts.persistence
    return {
        "name": name,
        "url": url,
        "state": state,
        "reason": reason,
        "epoch": epoch,
        "build": facts.props.build if facts.props else "",
        "model": facts.model,
        "fingerprint": facts.fingerprint.digest[:12] if facts.fingerprint else None,
        "persistence": {"mode": persistence.mode, "reason": persistence.reason or lack},
        "canary": facts.canary or None,
        "memory": {
            "kind": facts.kind,
            "may_roll_back": facts.kind.may_roll_back,
            "needs_boundary": facts.kind.needs_boundary,
            "window_opened": facts.window.opened,
        },
        "volatile_slots": facts.is_volatile,
        "shared_tokens": facts.n_ctx if facts.shares_memory and facts.slots > 1 else None,
        "breaker": breaker,
        "waiting": waiting,
        "slots": slots,
    }


def state_view(facts: Facts, lack: str) -> tuple[ServerState, str]:
    """The server's state and the reason for it: one that serves and is well, of which nothing can be saved
    for want of room, does less than it could."""
    is_well = facts.state is ServerState.HEALTHY
    return (ServerState.DEGRADED, lack) if lack and is_well else (facts.state, facts.reason)


def session_view(
    session: Session,
    view: SlotView | None,
    manifests: tuple[Manifest, ...],
    present: Fingerprint | None = None,
) -> Json:
    """`present` is the fingerprint of the server now."""
    generations = [one for manifest in manifests for one in manifest.generations]
    valid = any(one.is_valid for one in generations)
    preparation = session.preparation
    return {
        "session": short(session.key),
        "key": session.key,
        "state": state_of(view, has_valid=valid, has_invalid=bool(generations) and not valid),
        "slot": view.id if view else None,
        "namespace": session.namespace or None,
        "branch": session.branch or None,
        "parent": short(session.parent) if session.parent else None,
        "model": session.model,
        "requests": session.requests,
        "revision": session.revision,
        "last_seen": session.last_seen,
        "persists": session.may_persist,
        "last": None
        if preparation is None
        else {
            "outcome": preparation.outcome,
            "reason": preparation.reason,
            "restored_tokens": preparation.restored_tokens,
            "verdict": session.verdict,
        },
        "snapshots": [snapshot_view(manifest, present) for manifest in manifests],
    }


def snapshot_view(manifest: Manifest, present: Fingerprint | None = None) -> Json:
    """`differs_in` names what has to return before it can be restored."""
    return {
        "session": short(manifest.key),
        "server": manifest.server,
        "model": manifest.model,
        "fingerprint": manifest.fingerprint.digest[:12],
        "differs_in": list(manifest.fingerprint.diff(present)) if present else [],
        "created_at": manifest.created_at,
        "last_used_at": manifest.last_used_at,
        "generations": [_generation_view(one) for one in manifest.generations],
    }


def _generation_view(one: Generation) -> Json:
    return {
        "name": one.name,
        "tokens": one.tokens,
        "bytes": one.size_bytes,
        "revision": one.revision,
        "saved_at": one.saved_at,
        "origin": None if one.origin is None else one.origin.model_dump(mode="json"),
        "sha256": one.sha256,
        "valid": one.is_valid,
        "invalid_reason": one.invalid_reason,
    }
