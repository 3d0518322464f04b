"""The closed list of things that happen, past tense. The core emits these; metrics and logs listen.

`session` is always the 12-digit short key. Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvproxy.checkpoint.outcome import CheckpointOutcome, Outcome, Reason, RestoreOutcome, Trigger, Verdict
from kvproxy.frozen import frozen
from kvproxy.identifiers import Epoch, ServerName, SlotId
from kvproxy.sessions.lines import Cause


@dataclass(frozen=True, slots=True)
class ServerReady:
    """A life of the server began for us: its slots are known."""

    server: ServerName
    epoch: Epoch
    slots: int
    build: str
    persistence: str
    restarted: bool
    """False for the first epoch since kvproxy started."""


@dataclass(frozen=True, slots=True)
class ServerUnavailable:
    """The server cannot be used as it should be. `state` is `loading`, `unreachable` or `degraded`: then it
    serves and does not tell who it is."""

    server: ServerName
    state: str
    reason: str


@frozen
class SlotAcquired:
    server: ServerName
    slot: SlotId | None
    session: str | None
    purpose: str
    waited_seconds: float


@frozen
class SlotReleased:
    server: ServerName
    slot: SlotId | None
    session: str | None
    purpose: str


@dataclass(frozen=True, slots=True)
class SessionSwitched:
    """A slot goes from one session to another."""

    server: ServerName
    slot: SlotId
    evicted: str
    session: str | None


@dataclass(frozen=True, slots=True)
class SessionCold:
    server: ServerName
    slot: SlotId | None
    session: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class BranchBegan:
    """A conversation was not known, or turned out to be two. `source` is `id` or `content`, by which it was
    looked for; `parent` the short key of the session it comes from."""

    server: ServerName
    session: str
    source: str
    cause: Cause
    parent: str | None


@dataclass(frozen=True, slots=True)
class StaticIdSeen:
    """One client id names several conversations that begin alike; sent once for each such id."""

    server: ServerName
    session: str


@dataclass(frozen=True, slots=True)
class IdsDisagreed:
    """A request named one conversation in its headers and another in its body."""

    server: ServerName


@dataclass(frozen=True, slots=True)
class CheckpointStarted:
    server: ServerName
    slot: SlotId
    session: str
    trigger: Trigger


@dataclass(frozen=True, slots=True)
class CheckpointEnded:
    server: ServerName
    slot: SlotId
    session: str
    trigger: Trigger
    outcome: CheckpointOutcome
    tokens: int
    size_bytes: int
    duration_seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RestoreStarted:
    server: ServerName
    slot: SlotId
    session: str


@dataclass(frozen=True, slots=True)
class RestoreEnded:
    """Sent for each restore that was looked into, also where no call was made."""

    server: ServerName
    slot: SlotId
    session: str
    outcome: RestoreOutcome
    tokens: int
    size_bytes: int
    duration_seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RestoreProvedIneffective:
    """The restore was answered with success, and the next answer reused nothing of it."""

    server: ServerName
    slot: SlotId
    session: str
    restored_tokens: int
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class SnapshotInvalidated:
    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotsChanged:
    """How many snapshots are known, valid and invalid, and their bytes."""

    valid: int
    invalid: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PersistenceTripped:
    """The breaker opened: no save and no restore for `cooldown_seconds`."""

    server: ServerName
    failures: int
    cooldown_seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class PersistenceRecovered:
    server: ServerName


@dataclass(frozen=True, slots=True)
class SharedMemorySeen:
    """All slots of the server share one memory of `tokens` tokens."""

    server: ServerName
    tokens: int


@dataclass(frozen=True, slots=True)
class VolatileSlotsSeen:
    """The server clears idle slots behind our back; `advice` names the flag to change."""

    server: ServerName
    advice: str


@dataclass(frozen=True, slots=True)
class AuxiliarySeen:
    """A request was taken for a side call. `mark` is what told: a header, a shape, or whose wording it is."""

    server: ServerName
    endpoint: str
    mark: str


@dataclass(frozen=True, slots=True)
class RequestHeld:
    """A stream was begun by us, because its request had been held for long."""

    server: ServerName
    endpoint: str
    session: str | None
    held_seconds: float


@frozen
class RequestDone:
    """One exchange ended. Token counts are None where the answer did not tell."""

    server: ServerName
    endpoint: str
    slot: SlotId | None
    session: str | None
    outcome: Outcome
    reason: Reason | None
    verdict: Verdict
    status: int
    restored_tokens: int
    computed_tokens: int | None
    reused_tokens: int | None
    generated_tokens: int | None
    prepare_seconds: float
    overhead_seconds: float
    """Our own time before the request was sent, less queue, save and restore."""
    ttfb_seconds: float | None
    duration_seconds: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """`source` is `client` (it left), `upstream` (unreachable or broke off) or `proxy` (our own answer)."""

    server: ServerName
    endpoint: str
    session: str | None
    source: str
    code: str


@dataclass(frozen=True, slots=True)
class TaskDied:
    """A background task ended with an error nobody expected."""

    name: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class Warned:
    """Something an operator should read once; `code` is an error code or empty."""

    message: str
    code: str = ""


Event = (
    ServerReady
    | ServerUnavailable
    | SlotAcquired
    | SlotReleased
    | SessionSwitched
    | SessionCold
    | BranchBegan
    | StaticIdSeen
    | IdsDisagreed
    | CheckpointStarted
    | CheckpointEnded
    | RestoreStarted
    | RestoreEnded
    | RestoreProvedIneffective
    | SnapshotInvalidated
    | SnapshotsChanged
    | PersistenceTripped
    | PersistenceRecovered
    | SharedMemorySeen
    | VolatileSlotsSeen
    | AuxiliarySeen
    | RequestHeld
    | RequestDone
    | RequestFailed
    | TaskDied
    | Warned
)

Emit = Callable[[Event], None]
"""How the core tells: synchronous, never raises."""
