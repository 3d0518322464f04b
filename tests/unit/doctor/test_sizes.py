from __future__ import annotations

import pytest

from kvproxy.doctor.sizes import Weight, count, human, weigh
from kvproxy.upstream.replies import Saved


def test_two_snapshots_tell_what_a_token_weighs_and_what_is_there_besides() -> None:
    weight = weigh(Saved(100, 1_500), Saved(200, 2_500))
    assert weight == Weight(10.0, 500.0)
    assert weight.of(1_000) == 10_500


@pytest.mark.parametrize("second", [None, Saved(100, 2_000), Saved(200, 900)])
def test_one_snapshot_or_two_that_make_no_line_give_the_mean(second: Saved | None) -> None:
    assert weigh(Saved(100, 1_000), second) == Weight(10.0, 0)


def test_a_steep_line_leaves_nothing_negative_besides() -> None:
    assert weigh(Saved(100, 1_000), Saved(200, 3_000)).fixed_bytes == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1_000, "1.0 kB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")],
)
def test_sizes_are_shown_in_decimal_units(size: float, text: str) -> None:
    assert human(size) == text


def test_one_of_a_thing_has_no_plural() -> None:
    assert [count(n, "slot") for n in (0, 1, 2)] == ["0 slots", "1 slot", "2 slots"]
