from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvproxy.settings.model import Settings
from kvproxy.settings.problems import Problem, error_of, from_validation, keys


def lines(**sections: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"state_dir": "/s", **sections})
    return [str(problem) for problem in from_validation(caught.value)]


def test_a_problem_names_key_value_and_reason() -> None:
    assert lines(checkpoint={"min_tokens": -5}) == [
        "checkpoint.min_tokens: -5: should be greater than or equal to 0"
    ]


def test_every_problem_is_told_at_once() -> None:
    assert len(lines(server={"drain_seconds": -1, "listen": "x"}, queue={"max_waiting": -1})) == 3


@pytest.mark.parametrize(
    ("sections", "nearest"),
    [
        ({"server": {"lissten": "x"}}, "server.listen"),
        ({"chekpoint": {}}, "checkpoint"),
        ({"upstreams": [{"ulr": "x"}]}, "upstreams.*.url"),
        ({"min_tokens": 3}, "checkpoint.min_tokens"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(
    sections: dict[str, Any], nearest: str
) -> None:
    (line,) = lines(**sections)
    assert line.endswith(f"unknown setting; did you mean {nearest}?")


def test_a_key_like_no_other_is_just_unknown() -> None:
    assert lines(zzz=1) == ["zzz: 1: unknown setting"]
    assert lines(queue={"x": 3}) == ["queue.x: 3: unknown setting"]


def test_a_value_with_alternatives_is_told_once() -> None:
    assert lines(upstreams=[{"auxiliary_slots": "x"}]) == [
        "upstreams.0.auxiliary_slots: x: should be 'auto', or should be a valid integer, and is text"
    ]


def test_a_path_is_asked_for_in_our_words() -> None:
    assert lines(state_dir=7) == ["state_dir: 7: should be a path"]


def test_of_a_number_in_quotes_it_is_told_that_it_is_text() -> None:
    assert lines(queue={"max_waiting": "3"}) == [
        "queue.max_waiting: 3: should be a valid integer, and is text"
    ]
    assert lines(sessions={"implicit": "true"}) == [
        "sessions.implicit: true: should be a valid boolean, and is text"
    ]


def test_of_a_list_only_the_bad_entry_is_told() -> None:
    assert lines(upstreams=[{"slots": [0, -1]}]) == [
        "upstreams.0.slots.1: -1: should be greater than or equal to 0"
    ]


@pytest.mark.parametrize(
    "sections",
    [
        {"admin": {"token": 987654321}},
        {"upstreams": [{"api_key": 987654321}]},
        {"upstreams": [{"apikey": 987654321}]},
        {"admin": {"tokens": "987654321"}},
        {"upstreams": [{"url": "http://me:987654321@h"}]},
        {"upstreams": {"api_key": "987654321"}},
        {"upstreams": [{"api_key": "987654321"}, {"api_key": "987654321"}]},
    ],
)
def test_no_problem_shows_a_secret(sections: dict[str, Any]) -> None:
    assert "987654321" not in "".join(lines(**sections))


def test_a_problem_is_one_line_however_long_its_value() -> None:
    text = str(Problem("a", "x\n" * 500, "is long"))
    assert "\n" not in text
    assert len(text) < 200


def test_the_error_has_one_line_for_each_problem() -> None:
    assert str(error_of([Problem("a", 1, "x"), Problem("b", None, "y")])) == "a: 1: x\nb: null: y"


def test_the_keys_are_those_of_the_model_with_a_star_for_list_entries() -> None:
    assert {"state_dir", "server.listen", "upstreams", "upstreams.*.api_key", "metrics.public"} <= set(keys())
    assert "sessions.headers.*" not in keys()
