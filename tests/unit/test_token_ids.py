from __future__ import annotations

from array import array

import pytest

from kvproxy.token_ids import shared_length


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ((), (), 0),
        ((1, 2, 3), (), 0),
        ((1, 2, 3), (1, 2, 3), 3),
        ((1, 2, 3), (1, 2), 2),
        ((1, 2, 3), (9, 2, 3), 0),
        ((1, 2, 3, 4), (1, 2, 9, 4), 2),
    ],
)
def test_what_both_begin_with_is_counted(one: tuple[int, ...], other: tuple[int, ...], shared: int) -> None:
    assert shared_length(one, other) == shared == shared_length(other, one)
    assert shared_length(array("i", one), array("i", other)) == shared


def test_every_place_of_the_first_difference_is_found() -> None:
    whole = tuple(range(50))
    assert [shared_length(whole, (*whole[:at], -1, *whole[at + 1 :])) for at in range(50)] == list(range(50))
