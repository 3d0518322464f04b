from __future__ import annotations

from dataclasses import replace

import pytest

from kvproxy.doctor.check import Result
from kvproxy.doctor.findings import Reuse, reuse_of
from kvproxy.doctor.probe import Probed, Survival
from kvproxy.doctor.traits import judge_draft, judge_memory, judge_mode, judge_sleep, judge_stall
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream.replies import Saved
from tests.support.fakes_core import idle
from tests.unit.doctor.test_findings import FAILURE, GOOD, survival
from tests.unit.doctor.test_verdicts import PROPS

NOTHING = Probed(extended=survival(600, reused=0))
CONTINUES = replace(GOOD, rewritten=survival(632, reused=0))
FAILED = Probed(extended=Survival(600, FAILURE))
CUT_SHORT = replace(GOOD, rewritten=Survival(632, FAILURE))


@pytest.mark.parametrize(
    ("probed", "expected"),
    [
        (GOOD, Reuse.ALL),
        (CONTINUES, Reuse.CONTINUATION),
        (NOTHING, Reuse.NONE),
        (FAILED, None),
        (CUT_SHORT, None),
        (Probed("no answer"), None),
    ],
)
def test_what_came_back_tells_what_a_snapshot_is_good_for(probed: Probed, expected: Reuse | None) -> None:
    assert reuse_of(probed) is expected


def shown(probed: Probed, kind: MemoryKind) -> Probed:
    assert probed.extended is not None
    return replace(probed, extended=replace(probed.extended, kind=kind))


@pytest.mark.parametrize(
    ("probed", "words"),
    [
        (shown(GOOD, MemoryKind.FULL), "full attention, by the probe's file"),
        (shown(GOOD, MemoryKind.SLIDING_WINDOW), "sliding window, by the probe's file"),
        (shown(NOTHING, MemoryKind.HYBRID), "hybrid: attention and recurrent state, by the probe's file"),
        (GOOD, "can be turned back, as full attention can, by what came back"),
        (CONTINUES, "cannot be turned back"),
        (NOTHING, "as with a sliding window, by what came back"),
    ],
)
def test_the_kind_of_memory_is_read_from_the_file_or_told_by_what_came_back(
    probed: Probed, words: str
) -> None:
    check = judge_memory(probed)
    assert (check.name, check.result) == ("probed memory", Result.OK)
    assert words in check.detail


def test_where_nothing_came_back_the_kind_is_not_guessed() -> None:
    assert judge_memory(FAILED).result is Result.SKIPPED


@pytest.mark.parametrize(
    ("probed", "mode", "result"),
    [
        (GOOD, "plain", Result.OK),
        (CONTINUES, "boundary", Result.OK),
        (NOTHING, "off", Result.DEGRADED),
        (FAILED, "off", Result.DEGRADED),
    ],
)
def test_the_mode_follows_from_what_came_back(probed: Probed, mode: str, result: Result) -> None:
    check = judge_mode(probed)
    assert check.result is result
    assert check.detail.startswith(f"{mode}: ")


def timed(seconds: float | None, probed: Probed = GOOD) -> Probed:
    """Two saves, 60 MB and 64 MB, of which each took that long."""
    first, second = probed.extended, probed.rewritten
    assert first is not None
    assert second is not None
    return replace(
        probed,
        extended=replace(first, saved=Saved(600, 60_000_000, seconds)),
        rewritten=replace(second, saved=Saved(640, 64_000_000, seconds)),
    )


def test_the_stall_is_what_a_full_slot_would_take_at_the_measured_rate() -> None:
    check = judge_stall(timed(0.1), PROPS)
    assert check is not None
    assert check.result is Result.OK
    assert "stopped for 100 ms" in check.detail
    assert "(819.2 MB) takes about 1.3 s" in check.detail


def test_one_slot_has_no_others_to_stop() -> None:
    check = judge_stall(timed(0.1), replace(PROPS, total_slots=1))
    assert check is not None
    assert "full slot" not in check.detail


@pytest.mark.parametrize("probed", [timed(None), timed(0.0), FAILED, Probed("no answer")])
def test_a_server_that_does_not_tell_has_no_stall(probed: Probed) -> None:
    assert judge_stall(probed, PROPS) is None


def test_a_sleeping_server_is_not_said_to_be_well() -> None:
    assert judge_sleep(PROPS).result is Result.OK
    asleep = judge_sleep(replace(PROPS, is_sleeping=True))
    assert asleep.result is Result.DEGRADED
    assert "sleeps" in asleep.detail


def test_a_draft_model_is_named_with_what_it_means() -> None:
    assert judge_draft([idle(0)]).detail == "none runs ahead"
    check = judge_draft([idle(0), replace(idle(1), is_speculative=True)])
    assert check.result is Result.OK
    assert "erased before restores" in check.detail
