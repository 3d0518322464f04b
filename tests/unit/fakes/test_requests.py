from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import requests
from tests.fakes.requests import BadRequest
from tests.fakes.tokens import detokenize


@pytest.mark.parametrize(("pin", "meant"), [(1, 1), (0.7, 0), (-3, -3), ("1", -1), (None, -1), ([1], -1)])
def test_only_numbers_pin(pin: Any, meant: int) -> None:
    assert requests.pin_of({"id_slot": pin}) == meant
    assert requests.pin_of({}) == -1


def test_the_limit_is_read_under_each_of_its_names() -> None:
    for key in ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens"):
        (work,) = requests.completions({key: 7}, [[1]], pinnable=True, slots=1)
        assert work.n_predict == 7


def test_an_unpinnable_route_drops_the_pin() -> None:
    (work,) = requests.completions({"id_slot": 1}, [[1]], pinnable=False, slots=2)
    assert work.pin == -1


@pytest.mark.parametrize(
    ("prompt", "count"), [("ab", 1), ([1, 2, 3], 1), (["ab", "cd"], 2), ([[1, 2], "ab"], 2)]
)
def test_prompts_come_as_text_tokens_or_lists(prompt: Any, count: int) -> None:
    assert len(requests.plain_prompts({"prompt": prompt})) == count


def test_anthropic_and_responses_bodies_are_rendered_with_their_system_text() -> None:
    anthropic = {"system": [{"type": "text", "text": "S"}], "messages": [{"role": "user", "content": "U"}]}
    responses = {"instructions": "S", "input": "U"}
    (prompt,) = requests.rendered(requests.anthropic_text)(anthropic)
    assert detokenize(prompt) == "<s>" + requests.responses_text(responses)
    assert "system\nS<|im_end|>\n<|im_start|>user\nU" in detokenize(prompt)


@pytest.mark.parametrize("body", [b"", b"[", b"[]", b'"x"'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        requests.parse_json(body)


@pytest.mark.parametrize("name", ["kvp-1.bin", "a b", "ä"])
def test_bare_names_are_accepted(name: str) -> None:
    assert requests.valid_filename(name)


@pytest.mark.parametrize("name", ["", "/a", "a..b", "a?", "a.", "a ", "\x7f", 7])
def test_other_names_are_refused(name: Any) -> None:
    assert not requests.valid_filename(name)
