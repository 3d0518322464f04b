from __future__ import annotations

import pytest

from kvproxy.doctor.check import Change, Check, Report, Result, blocks, degraded, passed, skipped, unusable

CHANGE = Change("a flag", "a reason")
OK, SKIPPED, WORSE, WORST = (
    passed("a", "x"),
    skipped("b", "x"),
    degraded("c", "x", CHANGE),
    unusable("d", "y"),
)


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ((), 0),
        ((OK, SKIPPED), 0),
        ((OK, WORSE, SKIPPED), 1),
        ((WORSE, WORST, OK), 2),
    ],
)
def test_the_worst_result_decides_the_exit_code(checks: tuple[Check, ...], code: int) -> None:
    assert Report(checks).readiness.exit_code == code


def test_the_verdict_names_the_first_of_the_worst_findings() -> None:
    assert Report((OK, WORSE, WORST)).verdict == "unusable: d: y"
    assert Report((OK, WORSE, degraded("later", "z"))).verdict == "degraded: c: x"


def test_a_verdict_without_a_probe_claims_no_proof() -> None:
    assert "without the probe" in Report((OK,)).verdict
    assert "proven" in Report((OK,), is_proven=True).verdict


def test_a_change_that_two_checks_want_is_told_once() -> None:
    other = Change("another", "reason")
    assert Report((WORSE, degraded("e", "x", other, CHANGE))).changes == (CHANGE, other)


def test_only_what_is_unusable_ends_the_examination() -> None:
    assert not blocks([OK, SKIPPED, WORSE])
    assert blocks([OK, WORST])


def test_every_result_that_is_not_good_is_a_readiness() -> None:
    """`Report.verdict` finds the worst check by the word."""
    assert {result.value for result in Result} >= {"degraded", "unusable"}
    for check in (WORSE, WORST):
        assert Report((check,)).readiness.value == check.result.value
