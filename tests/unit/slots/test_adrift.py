from __future__ import annotations

import pytest

from kvproxy.identifiers import Revision, SessionKey
from kvproxy.slots import adrift as module
from kvproxy.slots.adrift import Adrift
from tests.support.fakes_core import A, B, C, stay


@pytest.fixture
def adrift() -> Adrift:
    return Adrift()


def test_one_is_until_it_lives_in_a_slot_again(adrift: Adrift) -> None:
    adrift.add(stay(A))
    assert (A in adrift, B in adrift) == (True, False)
    adrift.back(A)
    adrift.back(B)
    assert A not in adrift


def test_or_until_what_is_missing_is_in_a_file(adrift: Adrift) -> None:
    adrift.add(stay(A, revision=3))
    adrift.saved(A, Revision(2))
    adrift.saved(B, Revision(3))
    assert A in adrift
    adrift.saved(A, Revision(3))
    assert A not in adrift


def test_those_that_went_long_ago_are_forgotten(adrift: Adrift, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ADRIFT", 2)
    adrift.add(stay(A))
    adrift.add(stay(B))
    adrift.add(stay(A, revision=2))
    adrift.add(stay(C))
    assert [key in adrift for key in (A, B, C)] == [True, False, True]


def test_however_many_conversations_a_life_of_the_server_sees_few_are_kept(adrift: Adrift) -> None:
    keys = [SessionKey(f"{number:032x}") for number in range(3000)]
    for key in keys:
        adrift.add(stay(key))
    assert sum(key in adrift for key in keys) == module.MOST_ADRIFT
