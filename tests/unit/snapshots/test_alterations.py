from __future__ import annotations

from kvproxy.snapshots.alterations import Alteration, Alterations
from tests.unit.snapshots.samples import FINGERPRINT, OTHER_FINGERPRINT

EDIT, CUT = Alteration


def test_only_what_is_allowed_may_be_done() -> None:
    alterations = Alterations(frozenset({CUT}))
    assert [alterations.may(one, FINGERPRINT) for one in (EDIT, CUT)] == [False, True]


def test_one_miss_ends_one_alteration_at_one_server() -> None:
    alterations = Alterations(frozenset(Alteration))
    alterations.missed(EDIT, FINGERPRINT)
    assert [alterations.may(one, FINGERPRINT) for one in (EDIT, CUT)] == [False, True]
    assert alterations.may(EDIT, OTHER_FINGERPRINT)
