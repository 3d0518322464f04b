"""What the log says of each event: a level, a name that never changes, and fields."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvproxy.checkpoint.outcome import CheckpointOutcome, RestoreOutcome
from kvproxy.errors import ErrorCode
from kvproxy.frozen import frozen
from kvproxy.sessions.lines import Cause
from kvproxy.telemetry import events as e
from kvproxy.upstream.facts import ServerState

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR


@frozen
class Line:
    """`fields` keeps its order; those that are None are not written."""

    level: int
    name: str
    fields: Mapping[str, object]
    error: BaseException | None = None


def line_of(event: e.Event) -> Line:
    return _LINES[type(event)](event)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _server_ready(event: e.ServerReady) -> Line:
    level, name = (WARNING, "kv.backend.restarted") if event.restarted else (INFO, "kv.backend.ready")
    fields = {
        "server": event.server,
        "epoch": event.epoch,
        "slots": event.slots,
        "build": event.build,
        "persistence": event.persistence,
    }
    return Line(level, name, fields)


def _server_unavailable(event: e.ServerUnavailable) -> Line:
    # One that serves and does not tell who it is is there: it is its conversations that cannot be kept.
    is_there = event.state == ServerState.DEGRADED
    fields = {
        "server": event.server,
        "state": event.state,
        "code": (ErrorCode.BACKEND_UNSUPPORTED if is_there else ErrorCode.BACKEND_UNAVAILABLE).value,
        "reason": event.reason,
    }
    return Line(WARNING, "kv.backend.unavailable", fields)


def _volatile(event: e.VolatileSlotsSeen) -> Line:
    return Line(WARNING, "kv.backend.volatile", {"server": event.server, "advice": event.advice})


def _shared(event: e.SharedMemorySeen) -> Line:
    return Line(INFO, "kv.backend.shared_memory", {"server": event.server, "tokens": event.tokens})


def _acquired(event: e.SlotAcquired) -> Line:
    fields = {**_place(event), "purpose": event.purpose, "waited_ms": _ms(event.waited_seconds)}
    return Line(DEBUG, "kv.slot.acquire", fields)


def _released(event: e.SlotReleased) -> Line:
    return Line(DEBUG, "kv.slot.release", {**_place(event), "purpose": event.purpose})


def _switched(event: e.SessionSwitched) -> Line:
    return Line(INFO, "kv.session.switch", {**_place(event), "evicted": event.evicted})


def _cold(event: e.SessionCold) -> Line:
    return Line(INFO, "kv.session.cold", {**_place(event), "reason": event.reason.value})


def _branch_began(event: e.BranchBegan) -> Line:
    fields = {
        "session": event.session,
        "server": event.server,
        "source": event.source,
        "cause": event.cause.value,
        "parent": event.parent,
    }
    return Line(DEBUG if event.cause is Cause.NEW else INFO, "kv.session.branch", fields)


def _static_id(event: e.StaticIdSeen) -> Line:
    advice = (
        "one id names several conversations: they are told apart by what they say, and each has a snapshot "
        "of its own; a client that sends one id for all it does should send one for each, or none"
    )
    return Line(
        WARNING, "kv.session.static_id", {"session": event.session, "server": event.server, "advice": advice}
    )


def _ids_disagreed(event: e.IdsDisagreed) -> Line:
    return Line(DEBUG, "kv.session.disputed_id", {"server": event.server})


def _checkpoint_started(event: e.CheckpointStarted) -> Line:
    return Line(DEBUG, "kv.session.save.start", {**_place(event), "trigger": event.trigger.value})


_SAVE_CODES: Final[Mapping[CheckpointOutcome, ErrorCode]] = {
    CheckpointOutcome.EMPTY: ErrorCode.SAVE_FAILED,
    CheckpointOutcome.IMPLAUSIBLE: ErrorCode.SAVE_FAILED,
    CheckpointOutcome.REFUSED: ErrorCode.SAVE_FAILED,
    CheckpointOutcome.FAILED: ErrorCode.SAVE_FAILED,
    CheckpointOutcome.STORE_FAILED: ErrorCode.METADATA_IO,
    CheckpointOutcome.TIMED_OUT: ErrorCode.OPERATION_TIMEOUT,
    CheckpointOutcome.UNREACHABLE: ErrorCode.BACKEND_UNAVAILABLE,
}


def _checkpoint_ended(event: e.CheckpointEnded) -> Line:
    done = event.outcome is CheckpointOutcome.PUBLISHED
    fields = {**_place(event), "trigger": event.trigger.value, **_work(event)}
    return _ended("kv.session.save", done, event.outcome.is_failure, _SAVE_CODES.get(event.outcome), fields)


def _restore_started(event: e.RestoreStarted) -> Line:
    return Line(DEBUG, "kv.session.restore.start", _place(event))


_RESTORE_CODES: Final[Mapping[RestoreOutcome, ErrorCode]] = {
    RestoreOutcome.NO_SNAPSHOT: ErrorCode.SNAPSHOT_NOT_FOUND,
    RestoreOutcome.FINGERPRINT_MISMATCH: ErrorCode.SNAPSHOT_INCOMPATIBLE,
    RestoreOutcome.SNAPSHOT_INVALID: ErrorCode.SNAPSHOT_CORRUPT,
    RestoreOutcome.MEMORY_FULL: ErrorCode.RESTORE_FAILED,
    RestoreOutcome.FAILED: ErrorCode.RESTORE_FAILED,
    RestoreOutcome.REFUSED: ErrorCode.RESTORE_FAILED,
    RestoreOutcome.IMPLAUSIBLE: ErrorCode.RESTORE_FAILED,
    RestoreOutcome.TIMED_OUT: ErrorCode.OPERATION_TIMEOUT,
    RestoreOutcome.UNREACHABLE: ErrorCode.BACKEND_UNAVAILABLE,
    RestoreOutcome.STORE_FAILED: ErrorCode.METADATA_IO,
}


def _restore_ended(event: e.RestoreEnded) -> Line:
    done = event.outcome is RestoreOutcome.RESTORED
    fields = {**_place(event), **_work(event)}
    code = _RESTORE_CODES.get(event.outcome)
    if event.outcome is RestoreOutcome.FINGERPRINT_MISMATCH:
        # Not routine: the operator changed something, and `detail` says what.
        return Line(INFO, "kv.session.restore.skipped", {**fields, "code": code.value if code else None})
    return _ended("kv.session.restore", done, event.outcome.is_failure, code, fields)


def _ended(name: str, done: bool, failed: bool, code: ErrorCode | None, fields: dict[str, object]) -> Line:
    """Neither done nor failed is routine: nothing to save, nothing to restore."""
    if done:
        return Line(INFO, f"{name}.success", {k: v for k, v in fields.items() if k != "outcome"})
    fields |= {"code": code.value if code else None}
    return Line(WARNING if failed else DEBUG, f"{name}.{'failed' if failed else 'skipped'}", fields)


def _ineffective(event: e.RestoreProvedIneffective) -> Line:
    fields = {**_place(event), "tokens": event.restored_tokens, "reused": event.reused_tokens}
    return Line(WARNING, "kv.session.restore.ineffective", fields)


def _invalidated(event: e.SnapshotInvalidated) -> Line:
    fields = {
        "session": event.session,
        "code": ErrorCode.SNAPSHOT_CORRUPT.value,
        "reason": event.reason,
    }
    return Line(WARNING, "kv.snapshot.invalidated", fields)


def _snapshots(event: e.SnapshotsChanged) -> Line:
    fields = {"valid": event.valid, "invalid": event.invalid, "bytes": event.size_bytes}
    return Line(DEBUG, "kv.snapshot.changed", fields)


def _tripped(event: e.PersistenceTripped) -> Line:
    fields = {
        "server": event.server,
        "failures": event.failures,
        "cooldown_ms": _ms(event.cooldown_seconds),
        "reason": event.reason,
    }
    return Line(WARNING, "kv.persistence.circuit_open", fields)


def _recovered(event: e.PersistenceRecovered) -> Line:
    return Line(INFO, "kv.persistence.circuit_recovered", {"server": event.server})


def _request_done(event: e.RequestDone) -> Line:
    fields = {
        **_place(event),
        "endpoint": event.endpoint,
        "status": event.status,
        "outcome": event.outcome.value,
        "reason": event.reason.value if event.reason else None,
        "verdict": event.verdict.value,
        "restored": event.restored_tokens,
        "computed": event.computed_tokens,
        "reused": event.reused_tokens,
        "generated": event.generated_tokens,
        "prepare_ms": _ms(event.prepare_seconds),
        "overhead_ms": _ms(event.overhead_seconds),
        "ttfb_ms": _ms(event.ttfb_seconds),
        "duration_ms": _ms(event.duration_seconds),
    }
    return Line(INFO, "kv.request.done", fields)


def _auxiliary_seen(event: e.AuxiliarySeen) -> Line:
    fields = {"server": event.server, "endpoint": event.endpoint, "mark": event.mark}
    return Line(DEBUG, "kv.request.auxiliary", fields)


def _request_held(event: e.RequestHeld) -> Line:
    fields = {
        "session": event.session,
        "server": event.server,
        "endpoint": event.endpoint,
        "held_ms": _ms(event.held_seconds),
    }
    return Line(INFO, "kv.request.held", fields)


def _request_failed(event: e.RequestFailed) -> Line:
    """A client that left is no failure of ours."""
    fields = {
        "session": event.session,
        "server": event.server,
        "endpoint": event.endpoint,
        "source": event.source,
        "code": event.code or None,
    }
    return Line(INFO if event.source == "client" else WARNING, "kv.request.failed", fields)


def _task_died(event: e.TaskDied) -> Line:
    fields = {"task": event.name, "code": ErrorCode.INVARIANT.value, "error": repr(event.error)}
    return Line(ERROR, "kv.task.died", fields, event.error)


def _warned(event: e.Warned) -> Line:
    return Line(WARNING, "kv.warning", {"code": event.code or None, "message": event.message})


def _place(event: Any) -> dict[str, object]:
    """Who and where, in the order in which every line has it."""
    return {"session": event.session, "server": event.server, "slot": event.slot}


def _work(event: e.CheckpointEnded | e.RestoreEnded) -> dict[str, object]:
    return {
        "outcome": event.outcome.value,
        "tokens": event.tokens,
        "bytes": event.size_bytes,
        "duration_ms": _ms(event.duration_seconds),
        "detail": event.detail or None,
    }


_LINES: Final[Mapping[type, Callable[[Any], Line]]] = {
    e.ServerReady: _server_ready,
    e.ServerUnavailable: _server_unavailable,
    e.SharedMemorySeen: _shared,
    e.VolatileSlotsSeen: _volatile,
    e.SlotAcquired: _acquired,
    e.SlotReleased: _released,
    e.SessionSwitched: _switched,
    e.SessionCold: _cold,
    e.BranchBegan: _branch_began,
    e.StaticIdSeen: _static_id,
    e.IdsDisagreed: _ids_disagreed,
    e.CheckpointStarted: _checkpoint_started,
    e.CheckpointEnded: _checkpoint_ended,
    e.RestoreStarted: _restore_started,
    e.RestoreEnded: _restore_ended,
    e.RestoreProvedIneffective: _ineffective,
    e.SnapshotInvalidated: _invalidated,
    e.SnapshotsChanged: _snapshots,
    e.PersistenceTripped: _tripped,
    e.PersistenceRecovered: _recovered,
    e.AuxiliarySeen: _auxiliary_seen,
    e.RequestHeld: _request_held,
    e.RequestDone: _request_done,
    e.RequestFailed: _request_failed,
    e.TaskDied: _task_died,
    e.Warned: _warned,
}

ALWAYS_DEBUG: Final = frozenset({e.SlotAcquired, e.SlotReleased})
"""Events of each request whose line only the most talkative level shows: not worth building to find out."""
