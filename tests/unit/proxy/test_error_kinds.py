from __future__ import annotations

import pytest

from kvproxy.proxy.endpoints import Dialect
from kvproxy.proxy.error_kinds import kind_of


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (403, "permission_error", "permission_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (502, "server_error", "api_error"),
        (503, "unavailable_error", "overloaded_error"),
    ],
)
def test_each_dialect_has_its_own_word_for_a_status(status: int, openai: str, anthropic: str) -> None:
    assert kind_of(Dialect.OPENAI, status) == openai
    assert kind_of(Dialect.ANTHROPIC, status) == anthropic
