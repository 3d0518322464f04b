"""What the probe's sights mean: pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from kvproxy.doctor.check import Change, Check, Result, degraded, passed, skipped
from kvproxy.doctor.probe import Probed, Survival
from kvproxy.doctor.sizes import KEPT_GENERATIONS, Weight, human, weigh
from kvproxy.snapshots.files import FileCheck
from kvproxy.upstream.replies import ActionFailure, Completed, Props, Restored, Saved

PROBE = "probe"
PROBE_FILE = "probe file"
SAVE = "save"
RESTORE = "restore"
REUSE = "reuse"
SNAPSHOT_DIRECTORY = "snapshot directory"
IDLE_SLOTS = "idle slots"
SIZE = "size"

REUSED_SHARE = 0.9
"""Of what the next prompt shares with the snapshot; a server may compute a last few tokens again."""

KEEP_IDLE_SLOTS = Change(
    "llama-server -np N (or --no-cache-idle-slots, or --cache-ram 0)",
    "by default all slots share one KV cache, and each request clears the slots that are idle",
)
WHOLE_WINDOW = Change(
    "llama-server --swa-full",
    "a sliding-window model's snapshot holds only the window, and the server reuses nothing of it",
)
OTHER_MODEL = Change(
    "a model with full attention, or clients that only ever append",
    "recurrent and hybrid models cannot turn their state back: a snapshot serves an exact continuation only",
)
RIGHT_DIRECTORY = Change("upstreams[].snapshot_dir: DIR", "it must be the server's --slot-save-path, or null")


def judge_probe(probed: Probed) -> tuple[Check, ...]:
    """The checks `probe`, `save`, `restore` and `reuse`, as far as they got."""
    if probed.trouble:
        return (degraded(PROBE, f"could not be made: {probed.trouble}"),)
    survivals = [one for one in (probed.extended, probed.rewritten) if one is not None]
    checks = (_judge_save(survivals), _judge_restore(survivals), _judge_reuse(survivals))
    return tuple(check for check in checks if check is not None)


def _judge_save(survivals: list[Survival]) -> Check:
    for survival in survivals:
        if isinstance(survival.saved, ActionFailure):
            return degraded(SAVE, f"a save failed: {survival.saved.message}")
        if survival.saved.tokens < survival.shared_tokens:
            told = f"{survival.saved.tokens} of {survival.shared_tokens} tokens"
            return degraded(SAVE, f"a save reported success and held {told}")
    return passed(SAVE, f"{_tokens(survivals[0].saved)} tokens saved")


def _judge_restore(survivals: list[Survival]) -> Check | None:
    for survival in survivals:
        if isinstance(survival.restored, ActionFailure):
            return degraded(RESTORE, f"a restore failed: {survival.restored.message}")
        if isinstance(survival.restored, Restored) and survival.restored.tokens != _tokens(survival.saved):
            told = f"{survival.restored.tokens} of {_tokens(survival.saved)} tokens"
            return degraded(RESTORE, f"a restore reported success and put back {told}")
    restored = survivals[0].restored
    return None if restored is None else passed(RESTORE, f"{_tokens(restored)} tokens restored")


def _judge_reuse(survivals: list[Survival]) -> Check | None:
    for survival in survivals:
        if survival.answer is not None and not isinstance(survival.answer, Completed):
            return degraded(REUSE, f"the request after a restore failed: {survival.answer.message}")
    done = [one for one in survivals if isinstance(one.answer, Completed)]
    if not done:
        return None
    if not _is_reused(done[0]):
        detail = f"restore reports success and reuses nothing: {_share(done[0])} (a sliding-window model?)"
        return degraded(REUSE, detail, WHOLE_WINDOW)
    if len(done) > 1 and not _is_reused(done[1]):
        if done[0].is_opened:
            return passed(
                REUSE, f"restore works: {_share(done[0])} reused, its window opened in the snapshot"
            )
        detail = (
            f"restore works for an exact continuation ({_share(done[0])}), but reuses {_share(done[1])} "
            "where the client rewrites its last turn (a recurrent or hybrid model?)"
        )
        return degraded(REUSE, detail, OTHER_MODEL)
    return passed(REUSE, f"restore works: {', then '.join(_share(one) for one in done)} reused")


class Reuse(StrEnum):
    """What the next request could use of a snapshot."""

    ALL = "all"
    CONTINUATION = "continuation"
    """Only one that goes on exactly from its end."""
    NONE = "none"


def reuse_of(probed: Probed) -> Reuse | None:
    """None where the probe did not get that far."""
    extended, rewritten = probed.extended, probed.rewritten
    if extended is None or not extended.came_through:
        return None
    if not _is_reused(extended):
        return Reuse.NONE
    if rewritten is None or not rewritten.came_through:
        return None
    return Reuse.ALL if _is_reused(rewritten) else Reuse.CONTINUATION


def judge_idle_slots(probed: Probed, total_slots: int) -> Check:
    if total_slots == 1:
        return skipped(IDLE_SLOTS, "there is one slot, so no other can be cleared")
    if probed.is_cleared is None:
        return degraded(
            IDLE_SLOTS, "not proven: no second slot was idle and empty, or the server does not tell"
        )
    if probed.is_cleared:
        return degraded(
            IDLE_SLOTS,
            "volatile: a request in one slot clears the conversations in all others, "
            "so kvproxy has to save every answer and to launch one request at a time",
            KEEP_IDLE_SLOTS,
        )
    return passed(IDLE_SLOTS, "a request in one slot leaves the others alone")


def judge_snapshot_dir(directory: Path | None, why_unusable: str | None, file: FileCheck | None) -> Check:
    """`file` is what was found there of the probe's snapshot; None if none was saved."""
    if directory is None:
        return skipped(
            SNAPSHOT_DIRECTORY,
            "not set: the server alone sees the files, kvproxy cannot check or delete them",
        )
    if why_unusable is not None:
        return degraded(SNAPSHOT_DIRECTORY, f"cannot be used: {why_unusable}", RIGHT_DIRECTORY)
    if file is None:
        return passed(SNAPSHOT_DIRECTORY, f"{directory} is usable; not proven to be the server's")
    if not file.is_ok:
        detail = f"{directory} is not where the server saves, or not whole: {file.reason}"
        return degraded(SNAPSHOT_DIRECTORY, detail, RIGHT_DIRECTORY)
    return passed(SNAPSHOT_DIRECTORY, f"{directory} is where the server saves")


def is_proven(checks: Iterable[Check]) -> bool:
    """Whether a conversation was seen to come back."""
    return any(check.name == REUSE and check.result is Result.OK for check in checks)


def file_of(probed: Probed) -> FileCheck | None:
    """What was seen of the first file that the server said it wrote."""
    first = probed.extended
    return first.file if first is not None and isinstance(first.saved, Saved) else None


def judge_leftover(probed: Probed) -> Check | None:
    """The probe's file where it could not be deleted."""
    if probed.leftover is None:
        return None
    return passed(PROBE_FILE, f"{probed.leftover} stays in the server's save directory: delete it there")


def judge_size(probed: Probed, props: Props, quota_bytes: int, free_bytes: int | None) -> Check | None:
    """What full slots will weigh; None where nothing was saved or the context is not known."""
    first = probed.extended.saved if probed.extended else None
    if not isinstance(first, Saved) or first.tokens < 1 or props.n_ctx is None:
        return None
    second = probed.rewritten.saved if probed.rewritten else None
    weight = weigh(first, second if isinstance(second, Saved) else None)
    full = weight.of(props.n_ctx)
    detail = f"{_weighed(weight)}; a full slot takes {human(full)}"
    if props.total_slots > 1:
        detail += f", all {props.total_slots} at most {human(full * props.total_slots)}"
    detail += f"; the quota is {human(quota_bytes)}"
    if full * KEPT_GENERATIONS > quota_bytes:
        raised = Change(
            f"retention.max_total_bytes: {full * KEPT_GENERATIONS * props.total_slots}",
            f"each conversation keeps {KEPT_GENERATIONS} snapshots, so that the newest is never the only one",
        )
        return degraded(SIZE, f"{detail}, which does not hold one full conversation", raised)
    if free_bytes is not None:
        detail += f", {human(free_bytes)} are free on the disk"
        if full * KEPT_GENERATIONS > free_bytes:
            room = Change("more room for --slot-save-path", "a full conversation does not fit on its disk")
            return degraded(SIZE, detail, room)
    return passed(SIZE, detail)


def _weighed(weight: Weight) -> str:
    fixed = f" and {human(weight.fixed_bytes)} besides" if weight.fixed_bytes >= 1 else ""
    return f"{human(weight.bytes_per_token)} per token{fixed}"


def _is_reused(survival: Survival) -> bool:
    answer = survival.answer
    return isinstance(answer, Completed) and answer.reused >= REUSED_SHARE * survival.shared_tokens


def _share(survival: Survival) -> str:
    reused = survival.answer.reused if isinstance(survival.answer, Completed) else 0
    return f"{reused} of {survival.shared_tokens} tokens"


def _tokens(end: Saved | Restored | ActionFailure | None) -> int:
    return end.tokens if isinstance(end, Saved | Restored) else 0
