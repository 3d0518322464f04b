"""Frozen values of which each request makes many, made at the price of plain objects.

The `__init__` of a frozen dataclass puts each field through `object.__setattr__`, which takes seven times as
long as an assignment: a tenth of all that a resident request costs. So what is frozen here is so to the type
checker alone, which is where an assignment would be met first anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """As `dataclass(frozen=True, slots=True)`, with a hash of its fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
