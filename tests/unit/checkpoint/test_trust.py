from __future__ import annotations

import pytest

from kvproxy.checkpoint.outcome import Verdict
from kvproxy.checkpoint.trust import (
    MAX_REMEMBERED,
    Conclusion,
    Trust,
    is_saving_useless,
    likely_reason,
)
from kvproxy.identifiers import SessionKey, SnapshotName
from kvproxy.snapshots.memory_kind import MemoryKind

MISS, HIT = Verdict.INEFFECTIVE, Verdict.CONFIRMED
NOTHING, RETIRE, OFF = Conclusion(), Conclusion(retires=True), Conclusion(switches_off=True)


def after(*proofs: str) -> list[Conclusion]:
    """Each proof is a session, a snapshot, and + (reused), ~ (in part), - (nothing) or ? (not told)."""
    trust = Trust()
    verdicts = {"+": HIT, "~": Verdict.DIVERGED, "-": MISS, "?": Verdict.UNKNOWN}
    return [trust.proved(1, SessionKey(one[0]), SnapshotName(one[:2]), verdicts[one[2]]) for one in proofs]


def test_a_snapshot_that_missed_twice_is_retired() -> None:
    assert after("a1-", "a1-") == [NOTHING, RETIRE]


def test_two_snapshots_that_missed_once_each_are_not() -> None:
    assert after("a1-", "a2-") == [NOTHING, NOTHING]


@pytest.mark.parametrize("hit", ["a1+", "a1~"])
def test_a_hit_in_between_gives_a_snapshot_its_second_try_again(hit: str) -> None:
    assert after("a1-", hit, "a1-") == [NOTHING] * 3


def test_three_misses_in_a_row_of_several_sessions_switch_restoring_off() -> None:
    assert after("a1-", "b1-", "c1-") == [NOTHING, NOTHING, OFF]
    assert after("a1-", "b1-", "a2-") == [NOTHING, NOTHING, OFF]


def test_one_session_that_begins_anew_again_and_again_says_nothing_of_the_server() -> None:
    assert after("a1-", "a2-", "a3-", "a4-") == [NOTHING] * 4


@pytest.mark.parametrize("hit", ["b1+", "b1~"])
def test_anything_reused_in_between_begins_the_row_anew(hit: str) -> None:
    assert after("a1-", "b1-", hit, "c1-", "d1-") == [NOTHING] * 5


def test_what_was_not_told_neither_counts_nor_absolves() -> None:
    assert after("a1-", "b1-", "c1?", "d1-") == [NOTHING, NOTHING, NOTHING, OFF]


def test_another_life_begins_the_row_anew_but_a_snapshot_keeps_its_misses() -> None:
    trust = Trust()
    for session in "ab":
        trust.proved(1, SessionKey(session), SnapshotName(session), MISS)
    assert trust.proved(2, SessionKey("c"), SnapshotName("c"), MISS) == NOTHING
    assert trust.proved(2, SessionKey("a"), SnapshotName("a"), MISS) == RETIRE


def test_what_is_remembered_is_bounded() -> None:
    trust = Trust()
    for number in range(MAX_REMEMBERED + 1):
        trust.proved(1, SessionKey("a"), SnapshotName(str(number)), MISS)
    assert trust.proved(1, SessionKey("a"), SnapshotName("0"), MISS) == NOTHING
    assert trust.proved(1, SessionKey("a"), SnapshotName("500"), MISS) == RETIRE


@pytest.mark.parametrize(
    ("kind", "words", "useless"),
    [
        (MemoryKind.SLIDING_WINDOW, "--swa-full", True),
        (MemoryKind.RECURRENT, "rewrite their last turn", True),
        (MemoryKind.HYBRID, "rewrite their last turn", True),
        (MemoryKind.FULL, "not known", False),
        (MemoryKind.UNKNOWN, "not known", False),
    ],
)
def test_the_likely_reason_follows_from_the_kind_of_memory(
    kind: MemoryKind, words: str, useless: bool
) -> None:
    assert words in likely_reason(kind)
    assert is_saving_useless(kind) is useless
