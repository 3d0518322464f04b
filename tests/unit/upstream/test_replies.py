from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.upstream import replies
from kvproxy.upstream.replies import Adapter, Completed, Erased, Restored, Saved, SlotInfo

PROPS: dict[str, Any] = {
    "default_generation_settings": {"n_ctx": 8192, "params": {}},
    "total_slots": 2,
    "model_path": "/m/tiny.gguf",
    "model_alias": "tiny",
    "model_ftype": "all F32",
    "build_info": "b11434-x",
    "media_marker": "<__media_AbC__>",
    "is_sleeping": False,
    "modalities": {"vision": True, "audio": False, "video": True},
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    "total_slots default_generation_settings modalities id is_processing next_token n_decoded id_slot "
    "n_saved n_written n_restored n_read n_erased timings save_ms data meta error message tokens cache_n "
    "prompt_n completion_probabilities top_logprobs logprob path scale".split()
)


def test_props_are_read_field_by_field() -> None:
    props = replies.parse_props(PROPS)
    assert props is not None
    assert (props.total_slots, props.n_ctx, props.model_path) == (2, 8192, "/m/tiny.gguf")
    assert (props.model_alias, props.model_ftype, props.build) == ("tiny", "all F32", "b11434-x")
    assert props.modalities == ("video", "vision")
    assert props.has_marker
    assert not props.is_sleeping


@pytest.mark.parametrize("total", [None, 0, -1, "2", True, 2.0])
def test_props_without_a_positive_number_of_slots_are_not_llama_servers(total: object) -> None:
    assert replies.parse_props(PROPS | {"total_slots": total}) is None


def test_props_that_lack_the_rest_give_nothing_instead_of_a_guess() -> None:
    props = replies.parse_props({"total_slots": 1})
    assert props is not None
    assert (props.n_ctx, props.marker, props.modalities) == (None, "", ())


@pytest.mark.parametrize("marker", ["", replies.CONSTANT_MARKER])
def test_a_constant_marker_tells_no_life_from_the_next(marker: str) -> None:
    props = replies.parse_props(PROPS | {"media_marker": marker})
    assert props is not None
    assert not props.has_marker


@pytest.mark.parametrize(
    "change",
    [
        {"media_marker": "<__media_Other__>"},
        {"build_info": "b2"},
        {"model_path": "/m/other.gguf"},
        {"total_slots": 3},
        {"default_generation_settings": {"n_ctx": 4096}},
    ],
)
def test_another_process_has_another_identity(change: dict[str, Any]) -> None:
    before, after = replies.parse_props(PROPS), replies.parse_props(PROPS | change)
    assert before is not None
    assert after is not None
    assert before.identity != after.identity


def test_a_sleep_does_not_change_the_identity() -> None:
    before, after = replies.parse_props(PROPS), replies.parse_props(PROPS | {"is_sleeping": True})
    assert before is not None
    assert after is not None
    assert before.identity == after.identity
    assert after.is_sleeping


def test_a_slot_that_never_ran_has_no_counts() -> None:
    assert replies.parse_slots([{"id": 1, "n_ctx": 8192, "is_processing": False}]) == (
        SlotInfo(1, False, None, None, 0),
    )


def test_progress_is_prompt_tokens_processed_plus_tokens_generated() -> None:
    entry = {
        "id": 0,
        "is_processing": True,
        "id_task": 7,
        "n_prompt_tokens": 24,
        "n_prompt_tokens_processed": 20,
        "next_token": [{"n_decoded": 4}],
    }
    assert replies.parse_slots([entry]) == (SlotInfo(0, True, 7, 24, 24),)


@pytest.mark.parametrize(("told", "expected"), [(True, True), (False, False), (None, False), ("yes", False)])
def test_a_slot_speculates_only_if_it_says_so(told: object, expected: bool) -> None:
    (slot,) = replies.parse_slots([{"id": 0, "speculative": told}]) or ()
    assert slot.is_speculative is expected


def test_a_slot_that_does_not_say_whether_it_works_is_taken_for_busy() -> None:
    slots = replies.parse_slots([{"id": 0}])
    assert slots is not None
    assert slots[0].is_processing


@pytest.mark.parametrize("body", [{}, None, "x", [1], [{"is_processing": False}], [{"id": "0"}]])
def test_what_is_not_a_list_of_slots_is_none(body: object) -> None:
    assert replies.parse_slots(body) is None


def test_action_replies_are_read_with_the_servers_own_time() -> None:
    saved = {"id_slot": 0, "n_saved": 24, "n_written": 12824, "timings": {"save_ms": 146}}
    restored = {"id_slot": 0, "n_restored": 24, "n_read": 12824, "timings": {"restore_ms": 1.5}}
    assert replies.parse_saved(saved) == Saved(24, 12824, 0.146)
    assert replies.parse_restored(restored) == Restored(24, 12824, 0.0015)
    assert replies.parse_erased({"id_slot": 0, "n_erased": 24}) == Erased(24)


@pytest.mark.parametrize("timings", [None, {}, {"save_ms": "1"}, {"save_ms": -1}, {"save_ms": True}])
def test_a_save_that_does_not_tell_its_time_has_none(timings: object) -> None:
    assert replies.parse_saved({"n_saved": 1, "n_written": 2, "timings": timings}) == Saved(1, 2, None)


@pytest.mark.parametrize(
    "body", [{}, {"n_saved": 1}, {"n_saved": "1", "n_written": 2}, {"n_saved": -1, "n_written": 2}]
)
def test_a_save_without_its_counts_is_none(body: object) -> None:
    assert replies.parse_saved(body) is None


def test_the_message_of_an_error_is_read_from_both_shapes() -> None:
    assert replies.parse_error({"error": {"code": 503, "message": "Loading model"}}) == "Loading model"
    assert replies.parse_error({"error": "nope"}) == "nope"
    assert replies.parse_error(["x"]) == ""


def test_foreign_text_becomes_one_short_printable_line() -> None:
    line = replies.one_line("a\nb\x1b[31m" + "c" * 1000)
    assert line.startswith("a b [31mc")
    assert len(line) <= replies.ERROR_MESSAGE_CHARS
    assert line.isprintable()


def test_meta_is_that_of_the_first_model() -> None:
    assert replies.parse_meta({"data": [{"meta": {"n_vocab": 288}}, {"meta": {}}]}) == {"n_vocab": 288}
    assert replies.parse_meta({"data": [{"id": "x"}]}) == {}


def test_tokens_are_numbers_or_nothing() -> None:
    assert replies.parse_tokens({"tokens": [1, 2]}) == (1, 2)
    for tokens in (None, "12", [1, "2"], [True], [{"id": 1, "piece": "a"}]):
        assert replies.parse_tokens({"tokens": tokens}) is None


def test_a_completion_tells_what_was_computed_and_what_was_reused() -> None:
    assert replies.parse_completed({"timings": {"prompt_n": 3, "cache_n": 4}}) == Completed(3, 4)
    for timings in (None, {}, {"prompt_n": 3}, {"prompt_n": 3, "cache_n": -1}):
        assert replies.parse_completed({"timings": timings}) is None


LIKELY: dict[str, Any] = {
    "timings": {"prompt_n": 3, "cache_n": 0},
    "completion_probabilities": [
        {"id": 9, "logprob": -7.5, "top_logprobs": [{"id": 4, "logprob": -0.5}, {"id": 9, "logprob": -1}]},
        {"id": 4, "logprob": -7.5, "top_logprobs": [{"id": 1, "logprob": -0.5}]},
    ],
}


def test_what_was_likely_is_told_of_the_first_token() -> None:
    assert replies.parse_likely(LIKELY) == ((4, -0.5), (9, -1.0))


def test_what_was_likely_after_a_reused_prompt_is_not_told() -> None:
    assert replies.parse_likely(LIKELY | {"timings": {"prompt_n": 1, "cache_n": 2}}) is None
    assert replies.parse_likely(LIKELY | {"timings": None}) is None


@pytest.mark.parametrize(
    "listed",
    [
        None,
        [],
        [{"id": 4}],
        [{"id": 4, "logprob": None}],
        [{"id": 4, "logprob": True}],
        [{"id": 4, "logprob": float("nan")}],
        [{"id": 4, "logprob": -(10**400)}],
        [{"id": "4", "logprob": -1.0}],
        [{"id": 4, "logprob": -1.0}, {}],
    ],
)
def test_likely_tokens_have_ids_and_numbers_or_there_are_none(listed: object) -> None:
    assert replies.parse_likely(LIKELY | {"completion_probabilities": [{"top_logprobs": listed}]}) is None


@pytest.mark.parametrize("said", [None, [], {}, [7]])
def test_an_answer_without_probabilities_tells_nothing_likely(said: object) -> None:
    assert replies.parse_likely(LIKELY | {"completion_probabilities": said}) is None


def test_adapters_are_read_one_by_one() -> None:
    told = [{"id": 0, "path": "/l/x", "scale": 0.5, "task_name": ""}, {"id": 1, "scale": 1}]
    assert replies.parse_adapters(told) == (Adapter(0, "/l/x", 0.5), Adapter(1, "", 1.0))
    assert replies.parse_adapters([]) == ()


@pytest.mark.parametrize(
    "body", [None, {}, [None], [{"id": 0}], [{"scale": 1.0}], [{"id": 0, "scale": 1.0}, {"id": "1"}]]
)
def test_a_list_with_an_adapter_that_says_too_little_is_none(body: object) -> None:
    assert replies.parse_adapters(body) is None


@given(st.one_of(JSON, st.dictionaries(FIELDS, JSON), st.lists(st.dictionaries(FIELDS, JSON), min_size=1)))
def test_no_body_makes_a_parser_raise(body: object) -> None:
    for parse in (
        replies.parse_props,
        replies.parse_slots,
        replies.parse_saved,
        replies.parse_restored,
        replies.parse_erased,
        replies.parse_error,
        replies.parse_meta,
        replies.parse_slot_id,
        replies.parse_tokens,
        replies.parse_prompt,
        replies.parse_completed,
        replies.parse_likely,
        replies.parse_adapters,
    ):
        parse(body)
