"""How a checkpoint or a restore ended. Closed lists: each value is a metric label and a reason in a log."""

from __future__ import annotations

from enum import StrEnum

from kvproxy.frozen import frozen


class Trigger(StrEnum):
    """Why a checkpoint was taken."""

    SWITCH = "switch"
    IDLE = "idle"
    AGE = "age"
    TURN = "turn"
    REQUEST = "request"
    SHUTDOWN = "shutdown"
    MANUAL = "manual"


class CheckpointOutcome(StrEnum):
    PUBLISHED = "published"
    CLEAN = "clean"
    TOO_SMALL = "too_small"
    BUSY = "busy"
    SUPERSEDED = "superseded"
    EMPTY = "empty"
    IMPLAUSIBLE = "implausible"
    REFUSED = "refused"
    """The server said no."""
    FAILED = "failed"
    """The server failed at it, or gave an answer that is none."""
    STORE_FAILED = "store_failed"
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"
    BREAKER_OPEN = "breaker_open"
    NO_ROOM = "no_room"
    """On the disk."""
    OFF = "off"
    """This server cannot save."""
    UNWANTED = "unwanted"
    """The conversation is not to be kept: its client forbids it, or it is none."""

    @property
    def is_failure(self) -> bool:
        return self in _FAILED_CHECKPOINTS

    @property
    def loses_work(self) -> bool:
        """Whether work that was to be kept is gone with the slot."""
        return self.is_failure or self in _NOT_MADE


_NOT_MADE = frozenset({CheckpointOutcome.BUSY, CheckpointOutcome.BREAKER_OPEN, CheckpointOutcome.NO_ROOM})

_FAILED_CHECKPOINTS = frozenset(
    {
        CheckpointOutcome.EMPTY,
        CheckpointOutcome.IMPLAUSIBLE,
        CheckpointOutcome.REFUSED,
        CheckpointOutcome.FAILED,
        CheckpointOutcome.STORE_FAILED,
        CheckpointOutcome.TIMED_OUT,
        CheckpointOutcome.UNREACHABLE,
    }
)


class RestoreOutcome(StrEnum):
    RESTORED = "restored"
    NO_SNAPSHOT = "no_snapshot"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    SNAPSHOT_INVALID = "snapshot_invalid"
    DOES_NOT_FIT = "does_not_fit"
    NOT_EXTENDED = "not_extended"
    """The prompt leaves the snapshot before its end, and the memory cannot roll back."""
    WINDOW_SHUT = "window_shut"
    """What is saved has a sliding window that this server would not go on from."""
    MEMORY_FULL = "memory_full"
    """The server's memory was full of other slots. It says the same of a file that it cannot read."""
    REFUSED = "refused"
    """The server looked at the file and said no."""
    FAILED = "failed"
    """The server failed at it, or gave an answer that is none."""
    IMPLAUSIBLE = "implausible"
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"
    BUSY = "busy"
    STORE_FAILED = "store_failed"
    BREAKER_OPEN = "breaker_open"
    OFF = "off"
    """This server cannot restore."""
    DISABLED = "disabled"
    """The operator wants nothing restored."""

    @property
    def is_failure(self) -> bool:
        return self in _FAILED_RESTORES


@frozen
class Restoration:
    """How a restore ended; `tokens` is what is in the slot now because of it."""

    outcome: RestoreOutcome
    tokens: int = 0
    size_bytes: int = 0
    detail: str = ""


_FAILED_RESTORES = frozenset(
    {
        RestoreOutcome.MEMORY_FULL,
        RestoreOutcome.REFUSED,
        RestoreOutcome.FAILED,
        RestoreOutcome.IMPLAUSIBLE,
        RestoreOutcome.TIMED_OUT,
        RestoreOutcome.UNREACHABLE,
        RestoreOutcome.STORE_FAILED,
    }
)


class Outcome(StrEnum):
    """What a request was believed to find when it was sent (`X-KVProxy-Outcome`)."""

    RESIDENT = "resident"
    RESTORED = "restored"
    SEEDED = "seeded"
    COLD = "cold"
    AUXILIARY = "auxiliary"
    BYPASS = "bypass"
    PENDING = "pending"


class Reason(StrEnum):
    """Why the outcome is not better (`X-KVProxy-Reason`)."""

    NEW_SESSION = "new-session"
    NO_SNAPSHOT = "no-snapshot"
    FINGERPRINT_MISMATCH = "fingerprint-mismatch"
    SNAPSHOT_INVALID = "snapshot-invalid"
    RESTORE_FAILED = "restore-failed"
    BREAKER_OPEN = "breaker-open"
    PERSISTENCE_OFF = "persistence-off"
    RESTORE_OFF = "restore-off"
    PREFIX_DIVERGED = "prefix-diverged"
    NOT_WORTH_IT = "not-worth-it"
    EVICTED = "evicted"
    SERVER_RESTARTED = "server-restarted"
    SESSION_BUSY = "session-busy"


class Verdict(StrEnum):
    """What the answer proved of the belief."""

    CONFIRMED = "confirmed"
    INEFFECTIVE = "ineffective"
    DIVERGED = "diverged"
    UNKNOWN = "unknown"


@frozen
class Preparation:
    """What was done for a request before it was sent."""

    outcome: Outcome
    reason: Reason | None = None
    restored_tokens: int = 0
    from_scratch: bool = False
    """Nothing of what the slot holds may be used."""
