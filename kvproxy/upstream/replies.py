"""What llama-server answers, as values. Parsing is strict about types and lenient about what is missing:
a build that does not tell a field gives None, never a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvproxy.frozen import frozen
from kvproxy.identifiers import SlotId

SINGLE_PRECISION = 3.5e38
"""No number of the server's is larger."""

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
        return (self.marker, self.build, self.model_path, self.model_ftype, self.total_slots, self.n_ctx)


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


def is_router(body: object) -> bool:
    """Whether `/props` is that of a server which starts one of its own for each model."""
    return _map(body).get("role") == "router"


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One entry of `GET /slots`. Counts are None for a slot that never ran a task."""

    id: SlotId
    is_processing: bool
    id_task: int | None
    n_prompt_tokens: int | None
    progress: int
    """Grows while the slot computes or generates: prompt tokens processed plus tokens generated."""
    is_speculative: bool = False
    """A draft model runs ahead of it, with a memory of its own that no snapshot holds."""


class Obstacle(StrEnum):
    """Why a question to the server has no answer."""

    UNREACHABLE = "unreachable"
    """No connection, no answer in time, or an error of a gateway in between."""
    LOADING = "loading"
    """503: the model is being loaded."""
    UNAUTHORIZED = "unauthorized"
    """401 or 403: the server wants a key we do not have."""
    UNSUPPORTED = "unsupported"
    """501: switched off by a flag; the message names it."""
    ROUTER = "router"
    """It has no slots of its own, and its models' servers write snapshots over each other's."""
    NOT_LLAMA_SERVER = "not_llama_server"
    """Something answered, and not what llama-server answers."""
    UNWRITABLE = "unwritable"
    """It was not put: what it would carry is no JSON that we can write."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """`message` is the server's own where it gave one."""

    reason: Obstacle
    message: str


def parse_slots(body: object) -> tuple[SlotInfo, ...] | None:
    """None if the body is not a list of slots that each say their id."""
    if not isinstance(body, list):
        return None
    slots = tuple(slot for entry in body if (slot := _slot(_map(entry))) is not None)
    return slots if len(slots) == len(body) else None


def _slot(entry: Mapping[str, Any]) -> SlotInfo | None:
    slot_id = _int(entry.get("id"))
    if slot_id is None:
        return None
    token = entry.get("next_token")
    decoded = _int(_map(token[0]).get("n_decoded")) if isinstance(token, list) and token else None
    return SlotInfo(
        id=SlotId(slot_id),
        # Taken for idle, a slot that runs would be given away and mix two conversations in one answer.
        is_processing=entry.get("is_processing") is not False,
        id_task=_int(entry.get("id_task")),
        n_prompt_tokens=_int(entry.get("n_prompt_tokens")),
        progress=(_int(entry.get("n_prompt_tokens_processed")) or 0) + (decoded or 0),
        is_speculative=entry.get("speculative") is True,
    )


@dataclass(frozen=True, slots=True)
class Saved:
    """`tokens` in the file and `size_bytes` as the server counted them: a claim, not a proof.

    `seconds` is the time the server took to move them, without the wait for its turn; None if not told.
    """

    tokens: int
    size_bytes: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """As `Saved`, for what was read."""

    tokens: int
    size_bytes: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Erased:
    tokens: int


class Fault(StrEnum):
    """How a slot action failed."""

    UNREACHABLE = "unreachable"
    """No connection, it broke before the answer, or 503 (loading): the fate is known once the server is."""
    TIMED_OUT = "timed_out"
    """No answer within the deadline, or we stopped listening: the action may still run."""
    REFUSED = "refused"
    """400: the server looked and said no."""
    UNSUPPORTED = "unsupported"
    """501 or 404: this server has no slot actions."""
    UNAUTHORIZED = "unauthorized"
    """401 or 403: the server wants a key we do not have."""
    FAILED = "failed"
    """5xx, or an answer that is not what llama-server says."""


@dataclass(frozen=True, slots=True)
class ActionFailure:
    """`message` is the server's own where it gave one. `was_sent` is False where no connection could be
    made: then the server cannot have acted."""

    fault: Fault
    message: str
    status: int = 0
    was_sent: bool = True


def parse_saved(body: object) -> Saved | None:
    data = _map(body)
    tokens, size = _count(data.get("n_saved")), _count(data.get("n_written"))
    if tokens is None or size is None:
        return None
    return Saved(tokens, size, _seconds(data, "save_ms"))


def parse_restored(body: object) -> Restored | None:
    data = _map(body)
    tokens, size = _count(data.get("n_restored")), _count(data.get("n_read"))
    if tokens is None or size is None:
        return None
    return Restored(tokens, size, _seconds(data, "restore_ms"))


def parse_erased(body: object) -> Erased | None:
    tokens = _count(_map(body).get("n_erased"))
    return None if tokens is None else Erased(tokens)


def _count(value: object) -> int | None:
    number = _int(value)
    return None if number is None or number < 0 else number


def _seconds(data: Mapping[str, Any], field: str) -> float | None:
    value = _map(data.get("timings")).get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    return value / 1000


def parse_slot_id(body: object) -> int | None:
    """The slot that an action's answer names."""
    return _int(_map(body).get("id_slot"))


def parse_meta(body: object) -> Mapping[str, Any]:
    """The first model's `meta` of `GET /v1/models` (n_vocab, n_params, size, ftype ...), or {}."""
    models = _map(body).get("data")
    return _map(_map(models[0]).get("meta")) if isinstance(models, list) and models else {}


def parse_tokens(body: object) -> tuple[int, ...] | None:
    """The token ids of `POST /tokenize`; None if they are not plain numbers."""
    tokens = _map(body).get("tokens")
    if not isinstance(tokens, list):
        return None
    # Not entry by entry: a long prompt has 100,000 of them, and the loop stands still meanwhile.
    return tuple(tokens) if set(map(type, tokens)) <= {int} else None


def parse_prompt(body: object) -> str | None:
    """The text of `POST /apply-template`."""
    prompt = _map(body).get("prompt")
    return prompt if isinstance(prompt, str) else None


@dataclass(frozen=True, slots=True)
class Completed:
    """What `POST /completion` did with a prompt: tokens it `computed`, tokens it `reused`."""

    computed: int
    reused: int


def parse_completed(body: object) -> Completed | None:
    timings = _map(_map(body).get("timings"))
    computed, reused = _count(timings.get("prompt_n")), _count(timings.get("cache_n"))
    return None if computed is None or reused is None else Completed(computed, reused)


def parse_likely(body: object) -> tuple[tuple[int, float], ...] | None:
    """The tokens `POST /completion` was asked to list for the first one it said: id and natural logarithm of
    the probability, likeliest first. None if they are not told, or if the prompt was not computed in full."""
    completed, said = parse_completed(body), _map(body).get("completion_probabilities")
    if completed is None or completed.reused or not isinstance(said, list) or not said:
        return None
    listed = _map(said[0]).get("top_logprobs")
    if not isinstance(listed, list):
        return None
    pairs = tuple(pair for entry in listed if (pair := _logprob(_map(entry))) is not None)
    return pairs if pairs and len(pairs) == len(listed) else None


def _logprob(entry: Mapping[str, Any]) -> tuple[int, float] | None:
    token, logprob = _int(entry.get("id")), _number(entry.get("logprob"))
    return None if token is None or logprob is None else (token, logprob)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < SINGLE_PRECISION else None


@dataclass(frozen=True, slots=True)
class Adapter:
    """One entry of `GET /lora-adapters`; `scale` 0 is not applied."""

    id: int
    path: str
    scale: float


def parse_adapters(body: object) -> tuple[Adapter, ...] | None:
    """None if the body is not a list of adapters that each say their id and scale."""
    if not isinstance(body, list):
        return None
    adapters = tuple(one for entry in body if (one := _adapter(_map(entry))) is not None)
    return adapters if len(adapters) == len(body) else None


def _adapter(entry: Mapping[str, Any]) -> Adapter | None:
    adapter_id, scale = _int(entry.get("id")), _number(entry.get("scale"))
    if adapter_id is None or scale is None:
        return None
    return Adapter(adapter_id, _str(entry.get("path")), scale)


STALE_DRAFT = b"failed to process speculative batch"
"""llama-server's words when a draft model's memory is not that of the text before it, and will not be until
the slot is erased."""

OUT_OF_ROOM = b"Context size has been exceeded"
"""llama-server's words when the memory that its slots share is full: every request that runs ends with them,
and its slot is emptied."""

ERROR_MESSAGE_CHARS = 300


def parse_error(body: object) -> str:
    """The message of an error body in one printable line, or ""."""
    error = _map(body).get("error")
    return one_line(_str(error) or _str(_map(error).get("message")))


def one_line(text: str) -> str:
    """At most `ERROR_MESSAGE_CHARS` printable characters: foreign text must not forge log lines."""
    return "".join(c if c.isprintable() else " " for c in text[:ERROR_MESSAGE_CHARS]).strip()


@frozen
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
