"""What the server's answers to plain questions mean: pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from kvproxy.doctor.check import Change, Check, degraded, passed, skipped, unusable
from kvproxy.doctor.sizes import count
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream.facts import cannot_be_reached
from kvproxy.upstream.replies import ActionFailure, Fault, Obstacle, Props, SlotInfo, Unavailable

REACHABLE = "reachable"
LLAMA_SERVER = "llama-server"
SLOTS_API = "slots API"
SAVE_PATH = "save path"
SLOTS = "slots"
MEMORY = "memory"
WINDOW_EDIT = "window edit"
PREFIX_CUT = "prefix cut"

AUTOMATIC_SLOTS = 4
"""What llama-server takes without -np; it then shares one KV cache among them and clears idle slots."""

SET_KEY = Change("upstreams[].api_key: KEY", "the server answers management only to those who have its key")
SET_SAVE_PATH = Change("llama-server --slot-save-path DIR", "without it the server refuses to save slots")
NO_ROUTER = Change(
    "llama-server -m MODEL, one for each model",
    "a router has no slots of its own, and its models' servers write snapshots over each other's",
)
ALLOW_SLOTS = Change("llama-server without --no-slots", "without GET /slots no slot can be seen idle")

ASLEEP = "the server sleeps, and asking would wake it; send it a request and run the doctor again"


def judge_props(url: str, answer: Props | Unavailable) -> tuple[Check, ...]:
    """The checks `reachable` and `llama-server`, as far as they got."""
    if isinstance(answer, Props):
        reached = passed(REACHABLE, f"{url} answers")
        sleeping = ", asleep" if answer.is_sleeping else ""
        build = answer.build or "unknown"
        return (reached, passed(LLAMA_SERVER, f"build {build}, {_model(answer)}{sleeping}"))
    match answer.reason:
        case Obstacle.UNREACHABLE:
            start = Change(
                "llama-server --host HOST --port PORT, or upstreams[].url", "nothing answers at this address"
            )
            return (unusable(REACHABLE, cannot_be_reached(url, answer.message), start),)
        case Obstacle.LOADING:
            return (
                passed(REACHABLE, f"{url} answers"),
                unusable(LLAMA_SERVER, "the model is being loaded: run the doctor again when it is"),
            )
        case Obstacle.UNAUTHORIZED:
            return (
                passed(REACHABLE, f"{url} answers"),
                degraded(LLAMA_SERVER, f"GET /props is refused: {answer.message}", SET_KEY),
            )
        case Obstacle.ROUTER:
            return (passed(REACHABLE, f"{url} answers"), degraded(LLAMA_SERVER, answer.message, NO_ROUTER))
        case Obstacle.UNSUPPORTED | Obstacle.NOT_LLAMA_SERVER | Obstacle.UNWRITABLE:
            other = Change("upstreams[].url: URL", "what answers at this address is no llama-server")
            return (passed(REACHABLE, f"{url} answers"), unusable(LLAMA_SERVER, answer.message, other))


def judge_slots_api(answer: tuple[SlotInfo, ...] | Unavailable) -> Check:
    if not isinstance(answer, Unavailable):
        return passed(SLOTS_API, f"GET /slots shows {count(len(answer), 'slot')}")
    match answer.reason:
        case Obstacle.UNAUTHORIZED:
            return degraded(SLOTS_API, f"GET /slots is refused: {answer.message}", SET_KEY)
        case Obstacle.UNSUPPORTED:
            return degraded(SLOTS_API, f"GET /slots is switched off: {answer.message}", ALLOW_SLOTS)
        case _:
            return degraded(SLOTS_API, f"GET /slots has no answer: {answer.message}")


def judge_save_path(failure: ActionFailure | None) -> Check:
    if failure is None:
        return passed(SAVE_PATH, "slots can be saved")
    match failure.fault:
        case Fault.UNSUPPORTED:
            return degraded(SAVE_PATH, f"slots cannot be saved: {failure.message}", SET_SAVE_PATH)
        case Fault.UNAUTHORIZED:
            return degraded(SAVE_PATH, f"slot actions are refused: {failure.message}", SET_KEY)
        case _:
            return degraded(SAVE_PATH, f"slot actions do not work: {failure.message}")


def judge_numbers(props: Props, n_ctx_train: object = None) -> Check:
    """How many conversations fit at once, and how long they may be. `n_ctx_train` is the model's limit, to
    which the server lowers a larger context without a word."""
    each = "unknown context" if props.n_ctx is None else f"{props.n_ctx} tokens each"
    if props.n_ctx is not None and props.n_ctx == n_ctx_train:
        each += " (the model's limit)"
    detail = f"{count(props.total_slots, 'slot')}, {each}"
    if props.total_slots == AUTOMATIC_SLOTS:
        detail += " (as many as llama-server takes without -np: give -np explicitly)"
    return passed(SLOTS, detail)


def judge_memory(kind: MemoryKind) -> Check:
    """What the model file or the setting says; what it comes to is seen by the probe."""
    if kind is MemoryKind.UNKNOWN:
        detail = "the model file is not to be seen here or of a new kind; upstreams[].memory_kind can tell it"
        return skipped(MEMORY, detail)
    return passed(MEMORY, f"{kind}: {_MEANING[kind]}")


@dataclass(frozen=True, slots=True)
class Alterable:
    """What is known of the files: `window` is that of a model whose window slides, in tokens; `edits` is the
    setting `restore.window_edit`."""

    kind: MemoryKind
    window: int | None
    is_visible: bool
    edits: bool


def judge_window_edit(known: Alterable) -> Check:
    """Whether the windows of snapshots are opened where the server does not run with `--swa-full`."""
    if known.kind is not MemoryKind.SLIDING_WINDOW:
        return skipped(WINDOW_EDIT, "does not apply: no sliding window was seen")
    if not known.edits:
        return skipped(WINDOW_EDIT, "switched off (restore.window_edit)")
    if not known.is_visible:
        return skipped(WINDOW_EDIT, "cannot be done: upstreams[].snapshot_dir is not set")
    if known.window is None:
        return skipped(WINDOW_EDIT, "not done: the model file is not seen here, or its window does not slide")
    opened = f"the window of {known.window} tokens is opened in a copy of each snapshot"
    return passed(WINDOW_EDIT, f"applies: {opened}, unless the server runs with --swa-full")


def judge_prefix_cut(known: Alterable) -> Check:
    """Whether long snapshots are cut to what a prompt shares with them."""
    if not known.kind.may_roll_back:
        return skipped(PREFIX_CUT, "does not apply: only full attention can be cut")
    if not known.is_visible:
        return skipped(PREFIX_CUT, "cannot be done: upstreams[].snapshot_dir is not set")
    return passed(
        PREFIX_CUT, "applies: a restore reads only what a prompt shares, where that is much quicker"
    )


_MEANING = {
    MemoryKind.FULL: "a snapshot serves whatever begins as it does",
    MemoryKind.SLIDING_WINDOW: "a snapshot serves an exact continuation, with --swa-full or an opened window",
    MemoryKind.HYBRID: "a snapshot serves an exact continuation",
    MemoryKind.RECURRENT: "a snapshot serves an exact continuation",
}


def _model(props: Props) -> str:
    return PurePath(props.model_path).name or props.model_alias or "unknown model"
