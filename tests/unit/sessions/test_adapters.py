from __future__ import annotations

from typing import Any

import pytest

from kvproxy.sessions.adapters import adapters_in


@pytest.mark.parametrize("lora", [None, [], {}, "0", 0, True])
def test_a_request_that_asks_for_none_has_none(lora: Any) -> None:
    assert adapters_in({"lora": lora}) == adapters_in({}) == adapters_in(None) == ""


def test_the_same_adapters_are_the_same_however_they_are_written() -> None:
    assert adapters_in({"lora": [{"id": 0, "scale": 1}]}) == adapters_in({"lora": [{"scale": 1.0, "id": 0}]})


def test_another_scale_another_id_or_one_more_is_another() -> None:
    some: list[list[dict[str, Any]]] = [
        [{"id": 0, "scale": 1.0}],
        [{"id": 0, "scale": 0.5}],
        [{"id": 1, "scale": 1.0}],
        [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 1.0}],
        [{"id": 0}],
    ]
    assert len({adapters_in({"lora": lora}) for lora in some} - {""}) == len(some)


def test_values_of_any_kind_are_read_without_complaint() -> None:
    for odd in (None, "x", [1], {"id": {"a": 1}, "scale": [2]}, {"id": True, "scale": 1e308}):
        assert adapters_in({"lora": [odd] * 3})
