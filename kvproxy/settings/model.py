"""Every setting with its bounds, one class per section of the file.

A value outside its bounds refuses the start: a clamped one would run with something nobody asked for.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    Strict,
    field_validator,
)

from kvproxy.sessions.sources import BODY_FIELDS, HEADERS, NOT_IDENTITY
from kvproxy.settings.address import Address, check_key, check_url, parse_address

MASK = "***"
SECRETS = frozenset({"api_key", "api_keys", "token"})
"""Keys whose values are shown to nobody."""

_DAY = 86_400
_YEAR = 365 * _DAY
_TERABYTE = 1_000_000_000_000

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD_PATH = re.compile(r"[^.\s]+(\.[^.\s]+)*")
_HOST = re.compile(r"\*|\[[0-9a-f:.]+\]|[a-z0-9._-]+")


def _header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError("is no header name")
    if (meaning := NOT_IDENTITY.get(name.lower())) is not None:
        raise ValueError(f"names {meaning}, not a conversation")
    return name.lower()


def _field_path(path: str) -> str:
    if not _FIELD_PATH.fullmatch(path):
        raise ValueError("should be the name of a field, or names joined by dots")
    return path


def _host_name(host: str) -> str:
    if not _HOST.fullmatch(host.lower()):
        raise ValueError("should be a host without port (IPv6 in brackets), or * for any")
    return host.lower()


def _path(value: object) -> object:
    if not isinstance(value, str) or not value:
        return value
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError:
        raise ValueError("begins with a home directory that is not known") from None


T = TypeVar("T")
Listed = Annotated[tuple[T, ...], Strict(False)]
"""A list of the file, held as a tuple; its entries are as strict as any value."""

Folder = Annotated[Path, BeforeValidator(_path), PlainSerializer(str)]
Listen = Annotated[Address, BeforeValidator(parse_address), PlainSerializer(str)]
Url = Annotated[str, AfterValidator(check_url)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
FieldPath = Annotated[str, AfterValidator(_field_path)]
HostName = Annotated[str, AfterValidator(_host_name)]
Text = Annotated[str, Field(min_length=1)]
Key = Annotated[Text, AfterValidator(check_key)]
SlotNumber = Annotated[int, Field(ge=0, le=9999)]


class Section(BaseModel):
    """Closed and frozen; `strict` because "true" and "3" in quotes are no boolean and no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ServerSettings(Section):
    """Our own listener."""

    listen: Listen = Field(
        Address("127.0.0.1", 8090), description="Host and port to listen on; IPv6 in brackets."
    )
    response_headers: bool = Field(True, description="Add the X-KVProxy-* headers to managed answers.")
    max_body_bytes: int = Field(
        104_857_600, ge=1024, le=_TERABYTE, description="Larger request bodies are refused with 413."
    )
    drain_seconds: float = Field(
        25, ge=0, le=3600, description="Whole budget of a shutdown: running answers first, then saves."
    )
    write_stall_seconds: float = Field(
        60,
        ge=1,
        le=_DAY,
        description="A client that reads nothing for this long is dropped when others wait.",
    )


class UpstreamSettings(Section):
    """One llama-server."""

    name: str = Field(
        "main", pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$", description="Name in logs, metrics and session keys."
    )
    url: Url = Field("http://127.0.0.1:8080", description="Scheme, host and port of the llama-server.")
    api_key: Key | None = Field(
        None, repr=False, description="Sent upstream as a bearer token in place of the client's; never shown."
    )
    models: Listed[Text] = Field(("*",), min_length=1, description="Request models that are routed here.")
    runtime_key: Text | None = Field(
        None,
        description="Part of every snapshot's fingerprint: change it and old snapshots become invisible.",
    )
    memory_kind: Literal["auto", "full", "sliding_window", "hybrid", "recurrent"] = Field(
        "auto", description="How the model keeps its context; auto asks the model file and the snapshots."
    )
    snapshot_dir: Folder | None = Field(
        None,
        description="The server's --slot-save-path as we see it; null leaves the files to the server alone.",
    )
    slots: Literal["all"] | Listed[SlotNumber] = Field(
        "all", description="Slots to manage: all, or a list of ids."
    )
    auxiliary_slots: Literal["auto"] | SlotNumber = Field(
        "auto", description="Slots, the last ones, kept for side calls such as titles; auto keeps none."
    )
    connect_timeout_seconds: float = Field(
        5, gt=0, le=300, description="How long a connection to the server may take to open."
    )

    @property
    def set_apart(self) -> int:
        """How many slots no conversation gets."""
        return 0 if self.auxiliary_slots == "auto" else self.auxiliary_slots


class SessionSettings(Section):
    """How a conversation is recognised."""

    headers: Listed[HeaderName] = Field(
        HEADERS, description="Request headers that carry a conversation's id; the first one present wins."
    )
    body_fields: Listed[FieldPath] = Field(
        BODY_FIELDS, description="Fields of the JSON body looked at when no header matched."
    )
    implicit: bool = Field(True, description="Recognise a conversation without an id by its own messages.")
    exact_messages: bool = Field(
        False,
        description="Compute a prompt of /v1/messages in its slot first, pinned: the server takes no other.",
    )
    still_billing_stamp: bool = Field(
        False,
        description="Overwrite what changes in Claude Code's billing stamp with zeros; the only rewrite.",
    )
    max_branches_per_session: int = Field(
        16, ge=1, le=1000, description="Conversations told apart under one id; the least recent is forgotten."
    )


class AuxiliarySettings(Section):
    """How side calls (titles, tags, summaries, completions in an editor) are told from turns."""

    recognise: bool = Field(
        True, description="Tell side calls by headers, shape and wording; false: by X-KVProxy-Purpose alone."
    )
    headers: Listed[HeaderName] = Field(
        ("x-task",), description="Headers that name a task where one is set, and are empty for a turn."
    )
    fingerprints: Folder | None = Field(
        None,
        description="A YAML file with more wordings of side calls, looked at before our own.",
    )


class CheckpointSettings(Section):
    """When a conversation is saved."""

    on_switch: bool = Field(True, description="Save before another conversation takes the slot.")
    on_idle_seconds: float = Field(
        30,
        ge=0,
        le=_DAY,
        description="Save a conversation that was left alone for this long; 0 turns it off.",
    )
    on_shutdown: bool = Field(True, description="Save what is unsaved when kvproxy stops.")
    on_turn: bool = Field(False, description="Save after a turn that ends the exchange (no tool call open).")
    on_request: bool = Field(False, description="Save after every request.")
    min_tokens: int = Field(
        256, ge=0, le=10_000_000, description="Shorter conversations are computed again rather than saved."
    )
    timeout_seconds: float = Field(
        15, gt=0, le=3600, description="Least time allowed for a save; large ones get more by measured rate."
    )
    max_dirty_seconds: float = Field(
        300,
        ge=0,
        le=_YEAR,
        description="Save at the next pause once work is unsaved this long; 0 turns it off.",
    )
    max_unsaved_tokens: int = Field(
        16_384,
        ge=0,
        le=10_000_000,
        description="Save at the next pause once this much is unsaved; 0 turns it off.",
    )


class RestoreSettings(Section):
    """How a saved conversation comes back."""

    enabled: bool = Field(True, description="Restore at all; false serves cold what is not in a slot.")
    verify: bool = Field(True, description="Check file, size and identity before each restore.")
    accept_other_builds: bool = Field(
        True, description="Restore what another build of llama-server saved, if the model computes the same."
    )
    window_edit: Literal["auto", "off"] = Field(
        "auto",
        description="Open the sliding window in a copy of each snapshot where that makes it reusable.",
    )
    timeout_seconds: float = Field(
        30,
        gt=0,
        le=3600,
        description="Least time allowed for a restore; large ones get more by measured rate.",
    )


class QueueSettings(Section):
    """Who waits for a slot, and how long."""

    max_waiting: int = Field(
        256, ge=0, le=100_000, description="Requests that may wait for a slot; the next gets 429."
    )
    max_wait_seconds: float = Field(
        600, gt=0, le=_DAY, description="Longest wait for a slot; after that 503 with Retry-After."
    )


class KeepAliveSettings(Section):
    """What the client of a stream hears while we hold its request (queue, save, restore)."""

    after_seconds: float = Field(
        10,
        ge=0,
        le=_DAY,
        description="Silence after which a held stream is begun by us, with status 200; 0 turns it off.",
    )
    every_seconds: float = Field(
        2, ge=0.05, le=3600, description="Interval of the bytes that keep it alive from then on."
    )


class FailureSettings(Section):
    """What happens when saving or restoring fails."""

    strict: bool = Field(
        False,
        description="Answer 503 rather than go on without a conversation's KV if a save or restore fails.",
    )
    max_consecutive_failures: int = Field(
        3, ge=1, le=1000, description="Failures in a row that open the persistence breaker."
    )
    cooldown_seconds: float = Field(
        60, gt=0, le=_DAY, description="Time without saves and restores once the breaker is open."
    )


class RetentionSettings(Section):
    """Which snapshots are kept."""

    max_total_bytes: int = Field(
        107_374_182_400,
        ge=1,
        le=1000 * _TERABYTE,
        description="All snapshots together; least recently used go first.",
    )
    max_snapshots: int = Field(1000, ge=1, le=10_000_000, description="Number of snapshots kept.")
    max_age_days: float | None = Field(
        30, gt=0, le=36_500, description="Snapshots unused for longer are deleted; null keeps them."
    )


class SecuritySettings(Section):
    """Who may ask, and for what."""

    api_keys: Listed[Key] = Field(
        (), repr=False, description="Keys of which a client must present one; never shown."
    )
    allowed_hosts: Listed[HostName] = Field(
        ("localhost", "127.0.0.1", "[::1]"),
        min_length=1,
        description='Names a request may address us by (Host header, without port); "*" allows any.',
    )
    cors_origins: Listed[Text] = Field((), description="Web origins whose pages may call us.")
    allow_management: bool = Field(False, description="Let clients reach the server's own management routes.")


class AdminSettings(Section):
    """The operator's face."""

    listen: Listen | None = Field(None, description="A listener of its own; null shares the main one.")
    token: Key | None = Field(
        None,
        repr=False,
        description="Bearer token; without one only loopback clients are answered. Never shown.",
    )


class LoggingSettings(Section):
    """The log, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level written.")
    format: Literal["text", "json"] = Field("text", description="One line per event: text, or a JSON object.")


class MetricsSettings(Section):
    """Prometheus, at GET /metrics."""

    enabled: bool = Field(True, description="Serve /metrics.")
    public: bool = Field(
        False, description="Serve /metrics to clients who are not loopback and have no token."
    )


class Settings(Section):
    """All settings, resolved."""

    server: ServerSettings = Field(ServerSettings(), description="Our own listener.")
    upstreams: Listed[UpstreamSettings] = Field(
        (UpstreamSettings(),),
        min_length=1,
        description="The llama-servers in front of which we stand.",
    )
    state_dir: Folder = Field(
        description="Manifests, lock and quarantine; null means ${XDG_STATE_HOME:-~/.local/state}/kvproxy."
    )
    sessions: SessionSettings = Field(SessionSettings(), description="How a conversation is recognised.")
    auxiliary: AuxiliarySettings = Field(
        AuxiliarySettings(), description="How side calls are told from turns."
    )
    checkpoint: CheckpointSettings = Field(CheckpointSettings(), description="When a conversation is saved.")
    restore: RestoreSettings = Field(RestoreSettings(), description="How a saved conversation comes back.")
    queue: QueueSettings = Field(QueueSettings(), description="Who waits for a slot, and how long.")
    keep_alive: KeepAliveSettings = Field(
        KeepAliveSettings(), description="What the client of a held stream hears."
    )
    failure: FailureSettings = Field(
        FailureSettings(), description="What happens when saving or restoring fails."
    )
    retention: RetentionSettings = Field(RetentionSettings(), description="Which snapshots are kept.")
    security: SecuritySettings = Field(SecuritySettings(), description="Who may ask, and for what.")
    admin: AdminSettings = Field(AdminSettings(), description="The operator's face.")
    logging: LoggingSettings = Field(LoggingSettings(), description="The log, on stderr.")
    metrics: MetricsSettings = Field(MetricsSettings(), description="Prometheus, at GET /metrics.")

    @field_validator("upstreams")
    @classmethod
    def _names_are_unique(cls, upstreams: tuple[UpstreamSettings, ...]) -> tuple[UpstreamSettings, ...]:
        names = [upstream.name for upstream in upstreams]
        if len(set(names)) != len(names):
            raise ValueError("two entries have the same name")
        return upstreams

    def masked(self) -> dict[str, Any]:
        """Plain values ready for YAML, secrets replaced."""
        return {key: _masked(key, value) for key, value in self.model_dump(mode="json").items()}


def _masked(key: str, value: Any) -> Any:
    if key in SECRETS and value:
        return MASK
    if isinstance(value, dict):
        return {name: _masked(name, inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_masked("", inner) for inner in value]
    return value
