"""The parts of the relay that need no socket; the rest is proven over raw sockets in tests/integration."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from kvproxy.proxy.relay import RelayedResponse, has_body


@pytest.mark.parametrize(
    ("method", "status", "expected"),
    [
        ("GET", 200, True),
        ("POST", 500, True),
        ("HEAD", 200, False),
        ("GET", 204, False),
        ("GET", 304, False),
        ("GET", 101, False),
        ("GET", 205, True),
    ],
)
def test_method_and_status_decide_whether_there_is_a_body(method: str, status: int, expected: bool) -> None:
    assert has_body(method, status) is expected


async def test_a_body_cannot_be_written_before_the_head() -> None:
    response = RelayedResponse(status=200, reason="OK", headers=CIMultiDict())
    assert not response.prepared
    with pytest.raises(RuntimeError):
        await response.write(b"x")
