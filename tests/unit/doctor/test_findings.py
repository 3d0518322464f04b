from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvproxy.doctor.check import Check, Result, passed
from kvproxy.doctor.findings import (
    KEEP_IDLE_SLOTS,
    OTHER_MODEL,
    RIGHT_DIRECTORY,
    WHOLE_WINDOW,
    file_of,
    is_proven,
    judge_idle_slots,
    judge_leftover,
    judge_probe,
    judge_size,
    judge_snapshot_dir,
)
from kvproxy.doctor.probe import Probed, Survival
from kvproxy.identifiers import SnapshotName
from kvproxy.snapshots.files import FileCheck
from kvproxy.upstream.replies import (
    ActionFailure,
    Completed,
    Fault,
    Obstacle,
    Restored,
    Saved,
    Unavailable,
)
from tests.unit.doctor.test_verdicts import PROPS

FAILURE = ActionFailure(Fault.REFUSED, "the server's words")
DIRECTORY = Path("/slots")


def survival(shared: int, *, reused: int, held: int | None = None) -> Survival:
    held = shared if held is None else held
    answer = Completed(shared + 32 - reused, reused)
    return Survival(shared, Saved(held, held * 10), FileCheck(), Restored(held, held * 10), answer)


GOOD = Probed(
    "", survival(600, reused=600), survival(632, reused=632, held=639), is_cleared=False, leftover=None
)


def by_name(probed: Probed) -> dict[str, Check]:
    return {check.name: check for check in judge_probe(probed)}


def test_what_came_back_is_proven() -> None:
    checks = judge_probe(GOOD)
    assert [check.name for check in checks] == ["save", "restore", "reuse"]
    assert {check.result for check in checks} == {Result.OK}
    assert "600 of 600 tokens, then 632 of 632 tokens" in checks[-1].detail
    assert is_proven(checks)


def test_a_few_tokens_computed_again_are_no_fault() -> None:
    assert by_name(replace(GOOD, extended=survival(600, reused=596)))["reuse"].result is Result.OK


def test_a_restore_of_which_nothing_is_reused_names_the_window() -> None:
    check = by_name(replace(GOOD, extended=survival(600, reused=0)))["reuse"]
    assert (check.result, check.changes) == (Result.DEGRADED, (WHOLE_WINDOW,))
    assert "restore reports success and reuses nothing: 0 of 600 tokens" in check.detail
    assert not is_proven([check])


def test_a_restore_that_serves_only_an_exact_continuation_names_the_model() -> None:
    check = by_name(replace(GOOD, rewritten=survival(632, reused=0, held=639)))["reuse"]
    assert (check.result, check.changes) == (Result.DEGRADED, (OTHER_MODEL,))
    assert "600 of 600 tokens" in check.detail
    assert "0 of 632 tokens" in check.detail


@pytest.mark.parametrize(
    ("probed", "name", "told"),
    [
        (Probed("no tokens"), "probe", "no tokens"),
        (Probed(extended=Survival(600, FAILURE)), "save", "the server's words"),
        (Probed(extended=Survival(600, Saved(0, 36))), "save", "held 0 of 600 tokens"),
        (Probed(extended=Survival(600, Saved(600, 1), None, FAILURE)), "restore", "the server's words"),
        (
            Probed(extended=Survival(600, Saved(600, 1), None, Restored(5, 1), Completed(600, 0))),
            "restore",
            "put back 5 of 600 tokens",
        ),
        (
            Probed(
                extended=Survival(
                    600,
                    Saved(600, 1),
                    None,
                    Restored(600, 1),
                    Unavailable(Obstacle.UNREACHABLE, "gone"),
                )
            ),
            "reuse",
            "gone",
        ),
    ],
)
def test_where_the_probe_ended_is_told(probed: Probed, name: str, told: str) -> None:
    check = by_name(probed)[name]
    assert check.result is Result.DEGRADED
    assert told in check.detail


def test_a_second_round_that_fails_is_told_too() -> None:
    checks = by_name(replace(GOOD, rewritten=Survival(632, FAILURE)))
    assert checks["save"].result is Result.DEGRADED


def test_a_cleared_slot_names_all_three_flags() -> None:
    check = judge_idle_slots(replace(GOOD, is_cleared=True), 4)
    assert (check.result, check.changes) == (Result.DEGRADED, (KEEP_IDLE_SLOTS,))
    assert "volatile" in check.detail
    for flag in ("-np N", "--no-cache-idle-slots", "--cache-ram 0"):
        assert flag in KEEP_IDLE_SLOTS.what


@pytest.mark.parametrize(
    ("is_cleared", "slots", "result"),
    [
        (False, 2, Result.OK),
        (None, 2, Result.DEGRADED),
        (None, 1, Result.SKIPPED),
    ],
)
def test_what_is_known_of_idle_slots(is_cleared: bool | None, slots: int, result: Result) -> None:
    assert judge_idle_slots(replace(GOOD, is_cleared=is_cleared), slots).result is result


@pytest.mark.parametrize(
    ("directory", "why", "file", "result"),
    [
        (None, None, FileCheck("file is missing"), Result.SKIPPED),
        (DIRECTORY, "read-only", None, Result.DEGRADED),
        (DIRECTORY, None, None, Result.OK),
        (DIRECTORY, None, FileCheck(), Result.OK),
        (DIRECTORY, None, FileCheck("file is missing"), Result.DEGRADED),
    ],
)
def test_a_snapshot_directory_is_the_servers_only_if_the_file_is_there(
    directory: Path | None, why: str | None, file: FileCheck | None, result: Result
) -> None:
    check = judge_snapshot_dir(directory, why, file)
    assert check.result is result
    assert (check.changes == (RIGHT_DIRECTORY,)) == (result is Result.DEGRADED)


def test_no_file_is_looked_for_where_none_was_said_to_be_saved() -> None:
    assert file_of(GOOD) == FileCheck()
    assert file_of(Probed(extended=Survival(600, FAILURE))) is None
    assert file_of(Probed("trouble")) is None


def test_a_file_that_stays_is_named() -> None:
    assert judge_leftover(GOOD) is None
    check = judge_leftover(replace(GOOD, leftover=SnapshotName("kvp-x.kv")))
    assert check is not None
    assert "kvp-x.kv" in check.detail


def test_sizes_are_measured_against_quota_and_disk() -> None:
    check = judge_size(GOOD, PROPS, 10**9, 10**8)
    assert check == passed(
        "size",
        "10 bytes per token; a full slot takes 81.9 kB, all 2 at most 163.8 kB; the quota is 1.0 GB, "
        "100.0 MB are free on the disk",
    )


def test_a_quota_below_two_generations_names_the_setting() -> None:
    check = judge_size(GOOD, PROPS, 163_839, 10**9)
    assert check is not None
    assert check.result is Result.DEGRADED
    assert check.changes[0].what == "retention.max_total_bytes: 327680"
    enough = judge_size(GOOD, PROPS, 163_840, 10**9)
    assert enough is not None
    assert enough.result is Result.OK


def test_a_disk_below_two_generations_is_told() -> None:
    check = judge_size(GOOD, PROPS, 10**9, 163_839)
    assert check is not None
    assert check.result is Result.DEGRADED


def test_without_a_snapshot_or_a_context_there_is_no_size() -> None:
    assert judge_size(Probed("trouble"), PROPS, 10**9, None) is None
    assert judge_size(GOOD, replace(PROPS, n_ctx=None), 10**9, None) is None


def test_an_opened_window_that_serves_an_exact_continuation_is_good() -> None:
    opened = replace(survival(600, reused=600), is_opened=True)
    probed = replace(GOOD, extended=opened, rewritten=survival(632, reused=0, held=639))
    check = by_name(probed)["reuse"]
    assert (check.result, check.changes) == (Result.OK, ())
    assert "its window opened" in check.detail
    assert is_proven([check])
