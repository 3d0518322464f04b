"""What a client says itself of the purpose of a request, in its headers: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

PURPOSE = "X-KVProxy-Purpose"
"""Our own header, for people who write their own clients: `main` or `auxiliary`."""


@dataclass(frozen=True, slots=True)
class Signal:
    """`is_final`: it holds whatever the content says. A client's own label of a side call does not: one that
    carries the whole conversation on (a suggestion after a turn) runs best where that lives."""

    is_auxiliary: bool
    reason: str
    is_final: bool = False


def signal_of(headers: Mapping[str, str], task_headers: Sequence[str]) -> Signal | None:
    """The first that is present, in the order in which they are to be trusted; None without any.

    `task_headers` name a task where one is set, and are empty or absent for a turn of the conversation.
    """
    own = headers[PURPOSE].strip().lower() if PURPOSE in headers else ""
    if own in ("auxiliary", "main"):
        return Signal(own == "auxiliary", PURPOSE.lower(), is_final=True)
    return _of_clients(headers) or _of_tasks(headers, task_headers)


_CLASSES: Mapping[str, Mapping[str, bool]] = {
    "x-claude-code-request-class": {
        "main": False,
        "subagent": False,
        "workflow": False,
        # The whole conversation, and a request to sum it up: nowhere is that cheaper than in its slot.
        "compaction": False,
        "auxiliary": True,
    },
    "x-claude-code-compaction": {},
    "x-openai-subagent": {"memory_consolidation": True},
    "x-openai-memgen-request": {"": True},
    "x-deepseek-harness-compact": {"": True},
    "x-interaction-type": {"conversation-background": True, "conversation-subagent": False},
}
"""By header and value, whether it marks a side call. `""` stands for any value; others say nothing."""

_KIND_HEADER = "x-codex-turn-metadata"
_KINDS: Mapping[str, bool] = {"turn": False, "prewarm": False, "compaction": False, "memory": True}


def _of_clients(headers: Mapping[str, str]) -> Signal | None:
    for name, classes in _CLASSES.items():
        if name not in headers or not (value := headers[name].strip().lower()):
            continue
        is_auxiliary = classes.get(value, classes.get(""))
        if is_auxiliary is not None:
            return Signal(is_auxiliary, f"{name}: {value}" if value in classes else name)
    kind = _codex_kind(headers.get(_KIND_HEADER))
    return Signal(_KINDS[kind], f"{_KIND_HEADER}: {kind}") if kind in _KINDS else None


def _of_tasks(headers: Mapping[str, str], names: Sequence[str]) -> Signal | None:
    found = next((name for name in names if headers.get(name, "").strip()), None)
    return None if found is None else Signal(True, found)


def _codex_kind(metadata: str | None) -> str:
    if metadata is None or "request_kind" not in metadata:
        return ""
    try:
        document = orjson.loads(metadata)
    except orjson.JSONDecodeError:
        return ""
    kind = document.get("request_kind") if isinstance(document, dict) else None
    return kind if isinstance(kind, str) else ""
