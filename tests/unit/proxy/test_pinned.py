"""What a pinned request is sent with; how it is served is tested over sockets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from kvproxy.identifiers import SlotId
from kvproxy.proxy.pinned import _Run


@dataclass(frozen=True, slots=True)
class Calls:
    """What is asked of a visit and its call."""

    is_owner: bool

    @property
    def call(self) -> Calls:
        return self


@pytest.mark.parametrize(
    ("is_owner", "is_from_scratch", "uses_cache"),
    [(True, False, True), (False, False, None), (True, True, False), (False, True, False)],
)
def test_where_nothing_of_its_slot_may_be_used_no_client_has_a_say(
    is_owner: bool, is_from_scratch: bool, uses_cache: bool | None
) -> None:
    lease = cast(Any, None)
    run = _Run(cast(Any, Calls(is_owner)), lease, SlotId(0), None, None, None, 0, is_from_scratch)
    assert run.uses_cache is uses_cache
