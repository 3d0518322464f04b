"""Values made at the price of plain objects: they compare, hash and replace as frozen ones do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from kvproxy.frozen import frozen


@frozen
class Point:
    x: int
    y: int = 0
    note: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Rival:
    x: int
    y: int = 0
    note: str = field(default="", compare=False)


def test_equal_fields_make_equal_values_with_one_hash() -> None:
    assert Point(1, 2, "a") == Point(1, 2, "b")
    assert hash(Point(1, 2, "a")) == hash(Point(1, 2, "b")) == hash(Rival(1, 2))
    assert Point(1, 2) != Point(2, 1)
    assert {Point(1, 2): "found"}[Point(1, 2)] == "found"


def test_a_copy_with_other_fields_leaves_the_first_as_it_was() -> None:
    first = Point(1, 2)
    assert dataclasses.replace(first, y=3) == Point(1, 3)
    assert first == Point(1, 2)


def test_no_field_can_be_added() -> None:
    with pytest.raises(AttributeError):
        Point(1).z = 2  # type: ignore[attr-defined]


def test_it_shows_its_fields() -> None:
    assert repr(Point(1, 2, "n")) == repr(Rival(1, 2, "n")).replace("Rival", "Point")
