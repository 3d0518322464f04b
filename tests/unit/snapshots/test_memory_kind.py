from __future__ import annotations

from typing import Any, get_args

import pytest

from kvproxy.settings.model import UpstreamSettings
from kvproxy.snapshots.memory_kind import MemoryKind, kind_from, kind_of_setting

FULL, WINDOW, HYBRID, RECURRENT, UNKNOWN = MemoryKind


def test_only_full_attention_may_roll_back() -> None:
    assert [kind for kind in MemoryKind if kind.may_roll_back] == [FULL]
    assert [kind for kind in MemoryKind if not kind.is_append_only] == [FULL]


def test_a_kind_with_a_running_state_needs_a_boundary() -> None:
    assert [kind for kind in MemoryKind if kind.needs_boundary] == [HYBRID, RECURRENT]


@pytest.mark.parametrize(
    ("layout", "gguf", "setting", "kind"),
    [
        (FULL, WINDOW, HYBRID, FULL),
        (None, WINDOW, HYBRID, WINDOW),
        (UNKNOWN, WINDOW, FULL, WINDOW),
        (UNKNOWN, None, FULL, FULL),
        (UNKNOWN, UNKNOWN, RECURRENT, RECURRENT),
        (None, None, None, UNKNOWN),
        (None, UNKNOWN, None, UNKNOWN),
    ],
)
def test_the_file_comes_before_the_model_and_the_model_before_the_setting(
    layout: MemoryKind | None, gguf: MemoryKind | None, setting: MemoryKind | None, kind: MemoryKind
) -> None:
    assert kind_from(layout, gguf, setting) is kind


def test_what_nobody_knows_is_append_only_and_needs_no_boundary() -> None:
    assert UNKNOWN.is_append_only
    assert not UNKNOWN.needs_boundary


def test_the_settings_words_are_kinds_and_auto_is_none() -> None:
    words: Any = UpstreamSettings.model_fields["memory_kind"].annotation
    kinds = {kind_of_setting(word) for word in get_args(words)}
    assert kinds == set(MemoryKind) - {MemoryKind.UNKNOWN} | {None}
