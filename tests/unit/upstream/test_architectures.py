from __future__ import annotations

from itertools import combinations

import pytest

from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream import architectures
from kvproxy.upstream.architectures import kind_of, sliding_window_of

FULL, WINDOW, HYBRID, RECURRENT, UNKNOWN = MemoryKind


@pytest.mark.parametrize(
    ("architecture", "has_state", "window", "kv_heads", "kind"),
    [
        ("llama", False, None, (8,), FULL),
        ("llama", False, 4096, (8,), FULL),
        ("phi3", False, 2047, (32,), FULL),
        ("deci", False, None, (8, 0, 8), UNKNOWN),
        ("gemma3", False, 1024, (4,), WINDOW),
        ("gemma3", False, None, (4,), FULL),
        ("olmo2", False, 0, (4,), FULL),
        ("gpt-oss", False, 128, (8,), WINDOW),
        ("gpt-oss", False, None, (8,), UNKNOWN),
        ("gemma2", False, None, (4,), WINDOW),
        ("llama4", False, None, (8,), WINDOW),
        ("llama4", False, 0, (8,), UNKNOWN),
        ("mamba", True, None, (0,), RECURRENT),
        ("rwkv7", False, None, (), RECURRENT),
        ("lfm2", True, None, (0, 8), HYBRID),
        ("lfm2", True, 512, (0, 8), HYBRID),
        ("qwen35moe", True, None, (2,), HYBRID),
        ("a-new-one", True, None, (0, 8), HYBRID),
        ("a-new-one", True, None, (0, 0), RECURRENT),
        ("a-new-one", False, None, (8,), UNKNOWN),
        ("a-new-one", False, 512, (8,), UNKNOWN),
        ("llama", True, None, (8,), HYBRID),
        ("deepseek4", False, 128, (1,), UNKNOWN),
        ("bert", False, None, (12,), UNKNOWN),
    ],
)
def test_the_kind_follows_from_the_architecture_and_its_keys(
    architecture: str, has_state: bool, window: int | None, kv_heads: tuple[int, ...], kind: MemoryKind
) -> None:
    assert kind_of(architecture, has_state=has_state, window=window, kv_heads=kv_heads) is kind


def test_no_architecture_is_on_two_lists() -> None:
    lists = (architectures.RECURRENT, architectures.HYBRID, architectures.WINDOWED, architectures.FULL)

    assert not [one & other for one, other in combinations(lists, 2) if one & other]


def test_the_exceptions_are_of_architectures_with_windows() -> None:
    exceptions = architectures.WINDOWED_WITHOUT_KEY | architectures.FULL_WITHOUT_KEY | architectures.CHUNKED

    assert exceptions <= architectures.WINDOWED


@pytest.mark.parametrize(
    ("architecture", "window", "tokens"),
    [
        ("gemma3", 512, 512),
        ("gpt-oss", 128, 128),
        ("gemma2", None, 4096),
        ("gemma2", 0, None),
        ("gemma3", None, None),
        ("llama4", 8192, None),
        ("llama4", None, None),
        ("gemma-embedding", 512, None),
        ("modern-bert", 128, None),
        ("llama", 4096, None),
        ("lfm2", 512, None),
        ("of-tomorrow", 512, None),
    ],
)
def test_only_a_window_that_is_known_to_slide_is_one(
    architecture: str, window: int | None, tokens: int | None
) -> None:
    assert sliding_window_of(architecture, window) == tokens
