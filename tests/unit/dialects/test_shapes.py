"""Where bodies hold what becomes the prompt."""

from __future__ import annotations

import pytest

from kvproxy.dialects.endpoints import LABELS, Reach, classify
from kvproxy.dialects.shapes import SHAPES


def test_every_shape_is_of_an_endpoint_there_is() -> None:
    assert set(SHAPES) <= set(LABELS)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/completions",
        "/completions",
        "/completion",
        "/v1/responses",
        "/responses",
        "/v1/messages",
        "/infill",
    ],
)
def test_every_endpoint_that_continues_a_prompt_has_a_shape(path: str) -> None:
    endpoint = classify("POST", path)
    assert endpoint.reach in (Reach.PINNED, Reach.FLOATING)
    assert endpoint.label in SHAPES


@pytest.mark.parametrize("label", SHAPES)
def test_a_body_has_turns_or_a_raw_prompt_but_not_both(label: str) -> None:
    shape = SHAPES[label]
    assert shape.messages is None or shape.prompt is None
    assert shape.limits
