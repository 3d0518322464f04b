"""What we know of one server now: a frozen value, replaced by the watch and read by everyone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream.replies import Props

_CLEARS = (
    "the server clears idle slots whenever another one starts (unified KV with idle clearing, the default)"
)
_FLAGS = "start llama-server with an explicit -np N, or with --no-cache-idle-slots, or with --cache-ram 0"
VOLATILE_ADVICE = f"{_CLEARS}: {_FLAGS}"
SERIAL_ADVICE = (
    f"{_CLEARS}, so requests are launched one after the other and every answer is saved at its end: {_FLAGS}"
)
NO_SLOTS_ADVICE = "GET /slots is switched off: start llama-server without --no-slots"
WINDOW_ADVICE = (
    "the model has a sliding window, of which nothing is reused after a restore: "
    "start llama-server with --swa-full"
)
WINDOW_MISSED = (
    "the model has a sliding window, which was opened in a snapshot and yet not reused after its restore: "
    "start llama-server with --swa-full"
)
SAVE_PATH_ADVICE = "start llama-server with --slot-save-path DIR"
START_ADVICE = "start it there, or set upstreams[].url"
KEY_ADVICE = "the server wants an API key for slot actions: set upstreams[].api_key"

NOT_ASKED = "not asked yet"


def cannot_be_reached(url: str, reason: str) -> str:
    """The one sentence for a server that is not there."""
    return f"llama-server at {url} cannot be reached: {reason}"


class ServerState(StrEnum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It serves, but not everything works as it could; the reason says what, and what to change."""
    LOADING = "loading"
    SLEEPING = "sleeping"
    UNREACHABLE = "unreachable"

    @property
    def has_slots(self) -> bool:
        """Whether slots may be leased. A sleeping server wakes by the request itself."""
        return self in _WITH_SLOTS


_WITH_SLOTS = (ServerState.HEALTHY, ServerState.DEGRADED, ServerState.SLEEPING)


class PersistenceMode(StrEnum):
    UNKNOWN = "unknown"
    PLAIN = "plain"
    BOUNDARY = "boundary"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Persistence:
    """Whether slots can be saved and restored, and why not."""

    mode: PersistenceMode
    reason: str = ""
    still_saves: bool = False
    """Nothing is restored in this life, and yet the next one may have use for what is saved."""

    @property
    def is_on(self) -> bool:
        return self.mode in (PersistenceMode.PLAIN, PersistenceMode.BOUNDARY)

    @property
    def may_save(self) -> bool:
        return self.is_on or self.still_saves


@dataclass(frozen=True, slots=True)
class WindowFacts:
    """What restoring a sliding window comes to at this server.

    `opened` is its length in tokens where it is opened in a copy of each snapshot (see `slotfile.window`);
    None for a server that needs no such thing, or where it may not be done. `is_whole`: whether a restored
    window was seen to be reused as the server wrote it, as with `--swa-full`; None if that was not tried.
    """

    opened: int | None = None
    is_whole: bool | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """`reason` says why the state is not healthy."""

    state: ServerState = ServerState.UNREACHABLE
    reason: str = NOT_ASKED
    props: Props | None = None
    fingerprint: Fingerprint | None = None
    persistence: Persistence = field(default_factory=lambda: Persistence(PersistenceMode.UNKNOWN))
    kind: MemoryKind = MemoryKind.UNKNOWN
    """What kind of memory the model has."""
    window: WindowFacts = field(default_factory=WindowFacts)
    canary: str = ""
    """Its name, as in the fingerprint."""
    is_volatile: bool = False
    shares_memory: bool | None = None
    """Whether all slots share one memory of `n_ctx` tokens (unified KV); None if nothing has shown it yet."""
    pins: bool = True
    """Whether requests are pinned to slots of our choice. Where the server clears slots behind our back, or
    does not let us see them, it chooses better than we could, and requests pass through as they are."""

    pins_messages: bool = False
    """Whether `/v1/messages` was seen to run in the slot that it names."""

    @property
    def model(self) -> str:
        """The model's name for keys and for people: its path, which an alias does not change."""
        return self.props.model_path if self.props else ""

    @property
    def advice(self) -> str:
        """What does not work as it could, and what to change; empty if nothing is known."""
        return SERIAL_ADVICE if self.is_volatile and self.persistence.is_on else self.persistence.reason

    def as_is(self) -> dict[str, Any]:
        """The state of a server that answers, and the reason for it."""
        if self.props is not None and self.props.is_sleeping:
            return {"state": ServerState.SLEEPING, "reason": ""}
        is_off = self.persistence.mode is PersistenceMode.OFF
        state = ServerState.DEGRADED if is_off or self.is_volatile else ServerState.HEALTHY
        return {"state": state, "reason": self.advice}

    @property
    def slots(self) -> int:
        """How many the server has; 0 before it told."""
        return self.props.total_slots if self.props else 0

    @property
    def n_ctx(self) -> int | None:
        """Tokens that fit in one slot."""
        return self.props.n_ctx if self.props else None


def why_without_slots(url: str, facts: Facts) -> str:
    """The sentence for a server whose slots cannot be leased now."""
    if facts.state is ServerState.UNREACHABLE:
        return cannot_be_reached(url, facts.reason)
    return f"llama-server at {url} is {facts.state}: {facts.reason}"


class Standing:
    """The newest facts of one server. The watch alone writes them."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.obstacle = ""
        """Why nothing can be kept, whatever the server allows; set at start, if at all."""

    def set(self, **changes: object) -> None:
        self.facts = replace(self.facts, **changes)  # type: ignore[arg-type]
