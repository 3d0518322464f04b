"""What kind of server this is, for saving and restoring: its memory, its mode, its pauses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.doctor.check import Check, degraded, passed, skipped
from kvproxy.doctor.findings import Reuse, reuse_of
from kvproxy.doctor.probe import Probed, Survival
from kvproxy.doctor.sizes import human, weigh
from kvproxy.doctor.verdicts import ASLEEP
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream.facts import PersistenceMode
from kvproxy.upstream.replies import Props, Saved, SlotInfo

SLEEP = "sleep"
DRAFT = "draft model"
MEMORY = "probed memory"
MODE = "mode"
STALL = "stall"

_BY_FILE = {
    MemoryKind.FULL: "full attention",
    MemoryKind.SLIDING_WINDOW: "attention with a sliding window",
    MemoryKind.HYBRID: "hybrid: attention and recurrent state",
    MemoryKind.RECURRENT: "recurrent state",
}

_BY_REUSE = {
    Reuse.ALL: "can be turned back, as full attention can",
    Reuse.CONTINUATION: "cannot be turned back, as recurrent or hybrid state",
    Reuse.NONE: "a restored slot is of no use, as with a sliding window",
}

_MODES = {
    Reuse.ALL: PersistenceMode.PLAIN,
    Reuse.CONTINUATION: PersistenceMode.BOUNDARY,
    Reuse.NONE: PersistenceMode.OFF,
    None: PersistenceMode.OFF,
}

_MEANT = {
    PersistenceMode.PLAIN: "a slot is saved as its answer left it",
    PersistenceMode.BOUNDARY: "a snapshot serves only what goes on exactly from its end",
    PersistenceMode.OFF: "what is saved helps nobody",
}


def judge_sleep(props: Props) -> Check:
    return degraded(SLEEP, ASLEEP) if props.is_sleeping else passed(SLEEP, "awake")


def judge_draft(slots: Sequence[SlotInfo]) -> Check:
    if not any(slot.is_speculative for slot in slots):
        return passed(DRAFT, "none runs ahead")
    detail = "one runs ahead: its memory is in no snapshot, so slots are erased before restores"
    return passed(DRAFT, f"{detail}, and its first guesses after one are worse")


def judge_memory(probed: Probed) -> Check:
    """By the probe's file, where it could be read, else by what came back."""
    kind = probed.extended.kind if probed.extended else MemoryKind.UNKNOWN
    if kind in _BY_FILE:
        return passed(MEMORY, f"{_BY_FILE[kind]}, by the probe's file")
    reuse = reuse_of(probed)
    if reuse is None:
        return skipped(MEMORY, "not known: nothing came back to tell it by")
    return passed(MEMORY, f"{_BY_REUSE[reuse]}, by what came back")


def judge_mode(probed: Probed) -> Check:
    """How kvproxy can save and restore here."""
    mode = _MODES[reuse_of(probed)]
    detail = f"{mode}: {_MEANT[mode]}"
    return degraded(MODE, detail) if mode is PersistenceMode.OFF else passed(MODE, detail)


def judge_stall(probed: Probed, props: Props) -> Check | None:
    """How long a save stops every other answer: the server does nothing else meanwhile. None where it does
    not tell how long its saves took."""
    saves = [save for one in _rounds(probed) if isinstance(save := one.saved, Saved) and save.seconds]
    if not saves or not saves[0].tokens:
        return None
    taken = max(save.seconds or 0 for save in saves)
    told = f"other answers stopped for {_span(taken)} during the probe's saves"
    if props.n_ctx is None or props.total_slots == 1:
        return passed(STALL, told)
    full = weigh(saves[0], saves[1] if len(saves) > 1 else None).of(props.n_ctx)
    rate = sum(save.size_bytes for save in saves) / sum(save.seconds or 0 for save in saves)
    return passed(STALL, f"{told}; a save of a full slot ({human(full)}) takes about {_span(full / rate)}")


def _rounds(probed: Probed) -> list[Survival]:
    return [one for one in (probed.extended, probed.rewritten) if one is not None]


def _span(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
