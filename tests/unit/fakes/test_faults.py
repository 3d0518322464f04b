from __future__ import annotations

import pytest

from tests.fakes.faults import Failure, Faults, set_fault


def test_values_take_the_type_of_their_fault() -> None:
    faults = Faults()
    for text in ("slow_first_token=1.5", "batch=64", "mix_on_busy=true", "unpinned_slot=1", "frozen=0"):
        set_fault(faults, text)
    assert (faults.slow_first_token, faults.batch, faults.unpinned_slot) == (1.5, 64, 1)
    assert (faults.mix_on_busy, faults.frozen) == (True, False)


@pytest.mark.parametrize("text", ["nonsense=1", "planned=1", "save=explode", "batch=many"])
def test_what_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unknown fault|is not a valid|invalid literal"):
        set_fault(Faults(), text)


def test_a_planned_failure_happens_as_often_as_planned() -> None:
    faults = Faults()
    set_fault(faults, "save=error:2")
    assert [faults.take("save") for _ in range(3)] == [Failure.ERROR, Failure.ERROR, None]
    assert faults.take("restore") is None


def test_a_planned_failure_without_a_number_stays() -> None:
    faults = Faults()
    faults.fail("erase", "hang")
    assert {faults.take("erase") for _ in range(5)} == {Failure.HANG}
