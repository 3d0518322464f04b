from __future__ import annotations

import json

import pytest
from multidict import CIMultiDict

from kvproxy.auxiliary.signals import Signal, signal_of


def of(*, tasks: tuple[str, ...] = ("x-task",), **headers: str) -> Signal | None:
    return signal_of(CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()}), tasks)


def test_our_own_header_is_the_last_word() -> None:
    assert of(X_KVProxy_Purpose=" Auxiliary ") == Signal(True, "x-kvproxy-purpose", is_final=True)
    assert of(X_KVProxy_Purpose="main", X_Task="title") == Signal(False, "x-kvproxy-purpose", is_final=True)
    assert of(X_KVProxy_Purpose="whatever") is None


@pytest.mark.parametrize(
    ("name", "value", "is_auxiliary"),
    [
        ("x-claude-code-request-class", "auxiliary", True),
        ("x-claude-code-request-class", "main", False),
        ("x-claude-code-request-class", "compaction", False),
        ("x-claude-code-request-class", "subagent", False),
        ("x-openai-subagent", "memory_consolidation", True),
        ("x-openai-memgen-request", "1", True),
        ("x-deepseek-harness-compact", "1", True),
        ("X-Interaction-Type", "conversation-background", True),
        ("X-Interaction-Type", "conversation-subagent", False),
        ("x-codex-turn-metadata", json.dumps({"request_kind": "memory"}), True),
        ("x-codex-turn-metadata", json.dumps({"request_kind": "prewarm"}), False),
        ("x-codex-turn-metadata", json.dumps({"request_kind": "turn"}), False),
        ("X-Task", "title_generation", True),
    ],
)
def test_what_clients_say_is_heard(name: str, value: str, is_auxiliary: bool) -> None:
    signal = of(**{name: value})
    assert signal is not None
    assert (signal.is_auxiliary, signal.is_final) == (is_auxiliary, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-claude-code-request-class", "something-new"),
        ("x-openai-subagent", "review"),
        ("X-Interaction-Type", "conversation-agent"),
        ("X-Task", ""),
        ("x-codex-turn-metadata", '{"request_kind": 7}'),
        ("x-codex-turn-metadata", '{"request_kind'),
        ("x-codex-turn-metadata", '{"turn_id": "t"}'),
    ],
)
def test_what_says_nothing_is_no_signal(name: str, value: str) -> None:
    assert of(**{name: value}) is None


def test_the_headers_that_name_a_task_are_the_operators_to_choose() -> None:
    assert of(tasks=("x-what-for",), X_What_For="tags") == Signal(True, "x-what-for")
    assert of(tasks=(), X_Task="tags") is None
