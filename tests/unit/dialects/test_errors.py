"""The words of trouble, by dialect."""

from __future__ import annotations

import orjson
import pytest

from kvproxy.dialects.endpoints import Dialect
from kvproxy.dialects.errors import error_json


def test_openai_callers_read_message_type_and_code_in_one_object() -> None:
    error = {"message": "no", "type": "not_found_error", "code": "KV_SLOT_NOT_FOUND"}
    assert orjson.loads(error_json(Dialect.OPENAI, 404, "no", "KV_SLOT_NOT_FOUND")) == {"error": error}


def test_anthropic_callers_find_the_type_error_around_it() -> None:
    body = orjson.loads(error_json(Dialect.ANTHROPIC, 503, "no", "KV_DRAINING"))
    assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")


@pytest.mark.parametrize("dialect", Dialect)
def test_a_status_without_a_word_of_its_own_is_the_callers_or_the_servers_fault(dialect: Dialect) -> None:
    said = [orjson.loads(error_json(dialect, status, "", ""))["error"]["type"] for status in (418, 599)]
    assert said[0] == "invalid_request_error"
    assert said[1] in ("server_error", "api_error")
