from __future__ import annotations

from kvproxy.cli.table import table


def test_columns_are_as_wide_as_what_they_hold_and_the_last_is_not_padded() -> None:
    assert table(("A", "LONG", "C"), [("x", 1, "a b"), ("yyy", 22, "")]) == (
        "A    LONG  C\nx    1     a b\nyyy  22    -"
    )


def test_nothing_is_a_dash_and_truth_is_a_word() -> None:
    assert table(("A", "B", "C"), [(None, True, False)]).splitlines()[1] == "-  yes  no"


def test_zero_is_not_nothing() -> None:
    assert table(("A",), [(0,)]) == "A\n0"


def test_without_rows_there_is_the_head() -> None:
    assert table(("A", "B"), []) == "A  B"
