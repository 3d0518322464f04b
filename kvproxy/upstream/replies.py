"""What llama-server answers, as values. Parsing is strict about types and lenient about what is missing:
a build that does not tell a field gives None, never a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvproxy.identifiers import SlotId

CONSTANT_MARKER = "<__media__>"
"""What builds older than the random marker always say: it identifies no life of the process."""


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _str(value: object) -> str:
    return value if isinstance(value, str) else ""


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Props:
    """`GET /props`. `n_ctx` is tokens per slot; `marker` changes with each life of the process."""

    total_slots: int
    n_ctx: int | None
    model_path: str
    model_alias: str
    model_ftype: str
    build: str
    marker: str
    is_sleeping: bool
    modalities: tuple[str, ...]

    @property
    def has_marker(self) -> bool:
        """Whether the marker tells one life of the process from the next."""
        return self.marker not in ("", CONSTANT_MARKER)

    @property
    def identity(self) -> tuple[object, ...]:
        """What differs at the latest when another process answers."""
        return (self.marker, self.build, self.model_path, self.total_slots, self.n_ctx)


def parse_props(body: object) -> Props | None:
    """None if the body is not llama-server's (no positive `total_slots`)."""
    data = _map(body)
    total = _int(data.get("total_slots"))
    if total is None or total < 1:
        return None
    defaults = _map(data.get("default_generation_settings"))
    modalities = tuple(sorted(name for name, on in _map(data.get("modalities")).items() if on is True))
    return Props(
        total_slots=total,
        n_ctx=_int(defaults.get("n_ctx")),
        model_path=_str(data.get("model_path")),
        model_alias=_str(data.get("model_alias")),
        model_ftype=_str(data.get("model_ftype")),
        build=_str(data.get("build_info")),
        marker=_str(data.get("media_marker")),
        is_sleeping=data.get("is_sleeping") is True,
        modalities=modalities,
    )


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One entry of `GET /slots`. Counts are None for a slot that never ran a task."""

    id: SlotId
    is_processing: bool
    id_task: int | None
    n_prompt_tokens: int | None
    progress: int
    """Grows while the slot computes or generates: prompt tokens processed plus tokens generated."""


def parse_slots(body: object) -> tuple[SlotInfo, ...]:
    return (
        tuple(_slot(entry) for entry in body if isinstance(entry, Mapping)) if isinstance(body, list) else ()
    )


def _slot(entry: Mapping[str, Any]) -> SlotInfo:
    token = entry.get("next_token")
    decoded = _int(_map(token[0]).get("n_decoded")) if isinstance(token, list) and token else None
    return SlotInfo(
        id=SlotId(_int(entry.get("id")) or 0),
        is_processing=entry.get("is_processing") is True,
        id_task=_int(entry.get("id_task")),
        n_prompt_tokens=_int(entry.get("n_prompt_tokens")),
        progress=(_int(entry.get("n_prompt_tokens_processed")) or 0) + (decoded or 0),
    )


@dataclass(frozen=True, slots=True)
class Saved:
    """`tokens` in the file and `size_bytes` as the server counted them: a claim, not a proof."""

    tokens: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Restored:
    tokens: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Erased:
    tokens: int


class Fault(StrEnum):
    """How a slot action failed."""

    UNREACHABLE = "unreachable"
    """No connection, or it broke before the answer: the action's fate is known once the server is."""
    TIMED_OUT = "timed_out"
    """No answer within the deadline: the action may still run."""
    REFUSED = "refused"
    """400: the server looked and said no."""
    UNSUPPORTED = "unsupported"
    """501 or 404: this server has no slot actions."""
    UNAUTHORIZED = "unauthorized"
    """401 or 403: the server wants a key we do not have."""
    FAILED = "failed"
    """5xx, or an answer that is not what the server says."""


@dataclass(frozen=True, slots=True)
class ActionFailure:
    """`message` is the server's own where it gave one."""

    fault: Fault
    message: str
    status: int = 0


def parse_saved(body: object) -> Saved | None:
    data = _map(body)
    tokens, size = _int(data.get("n_saved")), _int(data.get("n_written"))
    return Saved(tokens, size) if tokens is not None and size is not None else None


def parse_restored(body: object) -> Restored | None:
    data = _map(body)
    tokens, size = _int(data.get("n_restored")), _int(data.get("n_read"))
    return Restored(tokens, size) if tokens is not None and size is not None else None


def parse_erased(body: object) -> Erased | None:
    tokens = _int(_map(body).get("n_erased"))
    return Erased(tokens) if tokens is not None else None


@dataclass(frozen=True, slots=True)
class Usage:
    """What one answer said of its prompt. None where it did not tell."""

    computed: int | None
    """Prompt tokens computed."""
    reused: int | None
    """Prompt tokens reused."""
    generated: int | None = None
    finish_reason: str | None = None

    @property
    def prompt(self) -> int | None:
        """All tokens of the prompt."""
        return None if self.computed is None or self.reused is None else self.computed + self.reused
