from __future__ import annotations

from dataclasses import replace

import pytest

from kvproxy.doctor.check import Result
from kvproxy.doctor.verdicts import (
    ALLOW_SLOTS,
    NO_ROUTER,
    SET_KEY,
    SET_SAVE_PATH,
    Alterable,
    judge_memory,
    judge_numbers,
    judge_prefix_cut,
    judge_props,
    judge_save_path,
    judge_slots_api,
    judge_window_edit,
)
from kvproxy.identifiers import SlotId
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream.replies import ActionFailure, Fault, Obstacle, Props, SlotInfo, Unavailable

PROPS = Props(2, 8192, "/models/m.gguf", "", "", "b1", "marker", False, ())


def test_a_server_that_tells_is_reached_and_recognised() -> None:
    reached, recognised = judge_props("http://u", PROPS)
    assert (reached.result, recognised.result) == (Result.OK, Result.OK)
    assert recognised.detail == "build b1, m.gguf"
    assert judge_props("http://u", replace(PROPS, is_sleeping=True))[1].detail.endswith("asleep")


@pytest.mark.parametrize(
    ("reason", "results"),
    [
        (Obstacle.UNREACHABLE, [Result.UNUSABLE]),
        (Obstacle.LOADING, [Result.OK, Result.UNUSABLE]),
        (Obstacle.UNAUTHORIZED, [Result.OK, Result.DEGRADED]),
        (Obstacle.UNSUPPORTED, [Result.OK, Result.UNUSABLE]),
        (Obstacle.ROUTER, [Result.OK, Result.DEGRADED]),
        (Obstacle.NOT_LLAMA_SERVER, [Result.OK, Result.UNUSABLE]),
    ],
)
def test_how_far_a_server_was_reached(reason: Obstacle, results: list[Result]) -> None:
    checks = judge_props("http://u", Unavailable(reason, "why"))
    assert [check.result for check in checks] == results


def test_an_unknown_key_names_the_setting() -> None:
    assert judge_props("http://u", Unavailable(Obstacle.UNAUTHORIZED, "no"))[1].changes == (SET_KEY,)


def test_a_router_is_told_how_to_be_one_server_for_each_model() -> None:
    assert judge_props("http://u", Unavailable(Obstacle.ROUTER, "several"))[1].changes == (NO_ROUTER,)


def test_slots_that_are_shown_are_counted() -> None:
    check = judge_slots_api((SlotInfo(SlotId(0), False, None, None, 0),))
    assert (check.result, check.detail) == (Result.OK, "GET /slots shows 1 slot")


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (Obstacle.UNSUPPORTED, (ALLOW_SLOTS,)),
        (Obstacle.UNAUTHORIZED, (SET_KEY,)),
        (Obstacle.UNREACHABLE, ()),
    ],
)
def test_without_the_slots_api_conversations_do_not_survive(reason: Obstacle, change: object) -> None:
    check = judge_slots_api(Unavailable(reason, "why"))
    assert (check.result, check.changes) == (Result.DEGRADED, change)
    assert "why" in check.detail


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        (Fault.UNSUPPORTED, (SET_SAVE_PATH,)),
        (Fault.UNAUTHORIZED, (SET_KEY,)),
        (Fault.TIMED_OUT, ()),
    ],
)
def test_without_slot_actions_the_flag_is_named(fault: Fault, change: object) -> None:
    check = judge_save_path(ActionFailure(fault, "why"))
    assert (check.result, check.changes) == (Result.DEGRADED, change)
    assert judge_save_path(None).result is Result.OK


def test_four_slots_may_be_nobodys_choice() -> None:
    assert judge_numbers(PROPS).detail == "2 slots, 8192 tokens each"
    assert "-np" in judge_numbers(replace(PROPS, total_slots=4)).detail
    assert judge_numbers(replace(PROPS, total_slots=1, n_ctx=None)).detail == "1 slot, unknown context"


def test_a_context_that_is_the_models_limit_is_said_to_be() -> None:
    assert judge_numbers(PROPS, 8192).detail == "2 slots, 8192 tokens each (the model's limit)"
    assert judge_numbers(PROPS, 8193).detail == "2 slots, 8192 tokens each"


def test_a_server_that_is_not_there_is_told_in_one_sentence() -> None:
    check = judge_props("http://u", Unavailable(Obstacle.UNREACHABLE, "connection refused"))[0]
    assert check.detail == "llama-server at http://u cannot be reached: connection refused"


@pytest.mark.parametrize("kind", [kind for kind in MemoryKind if kind is not MemoryKind.UNKNOWN])
def test_a_known_memory_is_shown_with_what_it_means(kind: MemoryKind) -> None:
    check = judge_memory(kind)
    assert (check.result, check.detail.startswith(f"{kind}: a snapshot serves")) == (Result.OK, True)


def test_an_unknown_memory_says_nothing_against_the_server_and_names_the_setting() -> None:
    check = judge_memory(MemoryKind.UNKNOWN)
    assert check.result is Result.SKIPPED
    assert "upstreams[].memory_kind" in check.detail


WINDOWED = Alterable(MemoryKind.SLIDING_WINDOW, 512, is_visible=True, edits=True)


@pytest.mark.parametrize(
    ("known", "result", "words"),
    [
        (WINDOWED, Result.OK, "applies: the window of 512 tokens"),
        (replace(WINDOWED, kind=MemoryKind.FULL), Result.SKIPPED, "does not apply"),
        (replace(WINDOWED, edits=False), Result.SKIPPED, "restore.window_edit"),
        (replace(WINDOWED, is_visible=False), Result.SKIPPED, "snapshot_dir"),
        (replace(WINDOWED, window=None), Result.SKIPPED, "does not slide"),
    ],
)
def test_a_window_edit_applies_or_the_reason_is_given(known: Alterable, result: Result, words: str) -> None:
    check = judge_window_edit(known)
    assert (check.result, words in check.detail) == (result, True)


@pytest.mark.parametrize("kind", MemoryKind)
@pytest.mark.parametrize("is_visible", [True, False])
def test_only_full_attention_that_is_seen_is_cut(kind: MemoryKind, is_visible: bool) -> None:
    check = judge_prefix_cut(Alterable(kind, None, is_visible, edits=True))
    assert (check.result is Result.OK) == (kind is MemoryKind.FULL and is_visible)
