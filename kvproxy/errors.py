"""Every error kvproxy raises, and the codes it answers with.

KvproxyError
├── SettingsError     at start: exit code 2, names key, value and reason
├── StateDirError     at start: the state directory cannot be used, so nothing is saved
│   └── StateDirTaken     another kvproxy uses it; exit code 1
├── ReplyError        answered to the client by us, with a code, a status and perhaps Retry-After
│   ├── CapacityError     429/503, ours: queue full, waited too long, draining
│   └── UpstreamError     502/503, theirs: unreachable, broke off before it answered
├── NotPinned         inside only: the server is no longer one whose slots we choose
└── InvariantError    a bug: illegal transition, lease released twice

Trouble with snapshots is no error: it is an outcome, and the request goes on cold.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The codes of errors that kvproxy itself makes."""

    BACKEND_UNAVAILABLE = "KV_BACKEND_UNAVAILABLE"
    BACKEND_UNSUPPORTED = "KV_BACKEND_UNSUPPORTED"
    SLOT_NOT_FOUND = "KV_SLOT_NOT_FOUND"
    SLOT_BUSY = "KV_SLOT_BUSY"
    SLOT_STATE_INVALID = "KV_SLOT_STATE_INVALID"
    SNAPSHOT_NOT_FOUND = "KV_SNAPSHOT_NOT_FOUND"
    SNAPSHOT_INCOMPATIBLE = "KV_SNAPSHOT_INCOMPATIBLE"
    SNAPSHOT_CORRUPT = "KV_SNAPSHOT_CORRUPT"
    SAVE_FAILED = "KV_SAVE_FAILED"
    RESTORE_FAILED = "KV_RESTORE_FAILED"
    ERASE_FAILED = "KV_ERASE_FAILED"
    MANIFEST_INVALID = "KV_MANIFEST_INVALID"
    METADATA_IO = "KV_METADATA_IO"
    OPERATION_TIMEOUT = "KV_OPERATION_TIMEOUT"
    INVARIANT = "KV_INVARIANT"
    QUEUE_FULL = "KV_QUEUE_FULL"
    QUEUE_TIMEOUT = "KV_QUEUE_TIMEOUT"
    DRAINING = "KV_DRAINING"
    ROUTE_FORBIDDEN = "KV_ROUTE_FORBIDDEN"
    ROUTE_NOT_FOUND = "KV_ROUTE_NOT_FOUND"
    HOST_FORBIDDEN = "KV_HOST_FORBIDDEN"
    UNAUTHORIZED = "KV_UNAUTHORIZED"
    BODY_TOO_LARGE = "KV_BODY_TOO_LARGE"
    REQUEST_INVALID = "KV_REQUEST_INVALID"
    USAGE_INVALID = "KV_USAGE_INVALID"
    DAEMON_UNAVAILABLE = "KV_DAEMON_UNAVAILABLE"


class KvproxyError(Exception):
    """Root of what kvproxy raises on purpose."""

    code: str = ErrorCode.INVARIANT
    """What a script is told that asked for JSON. That of another version's daemon need not be one of ours."""


class SettingsError(KvproxyError):
    """The settings cannot be used."""

    code = ErrorCode.USAGE_INVALID


class StateDirError(KvproxyError):
    """The state directory cannot be used."""

    code = ErrorCode.METADATA_IO


class StateDirTaken(StateDirError):
    """Another process uses the state directory."""


class ReplyError(KvproxyError):
    """An answer that kvproxy gives in the upstream's place.

    `status` is the HTTP status, `retry_after_seconds` becomes `Retry-After` where it is set.
    """

    code: ErrorCode

    def __init__(
        self, code: ErrorCode, message: str, *, status: int, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.retry_after_seconds = retry_after_seconds

    @property
    def is_upstream(self) -> bool:
        """Whether the upstream is to blame."""
        return False


class CapacityError(ReplyError):
    """Ours: the request cannot be taken now; a client may try again."""

    def __init__(self, code: ErrorCode, message: str, *, status: int = 503, retry_after_seconds: int = 1):
        super().__init__(code, message, status=status, retry_after_seconds=retry_after_seconds)


class UpstreamError(ReplyError):
    """Theirs: the upstream could not be reached or broke off before it answered.

    `was_sent` is False where not a byte of the request left us: then the server cannot have acted on it.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 502,
        retry_after_seconds: int | None = None,
        was_sent: bool = True,
    ) -> None:
        super().__init__(
            ErrorCode.BACKEND_UNAVAILABLE, message, status=status, retry_after_seconds=retry_after_seconds
        )
        self.was_sent = was_sent

    @property
    def is_upstream(self) -> bool:
        return True


class NotPinned(KvproxyError):
    """Requests to this server are no longer pinned: whoever waits for a slot goes on without one."""


class InvariantError(KvproxyError):
    """A bug in kvproxy."""
