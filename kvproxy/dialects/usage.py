"""What an answer says of its prompt, wherever its endpoint tells it: pure.

Looked for in the answer's first and last words, which is all that is kept of a stream. llama-server puts
`timings` in the last event of most; the Messages API tells its prompt counts in the first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvproxy.upstream.replies import Usage

_DECODER = json.JSONDecoder()
_FINISH = re.compile(r'"(?:finish_reason|stop_reason|stop_type)":\s*"(\w+)"')
_FINISHES: Mapping[str, str] = {
    "end_turn": "stop",
    "eos": "stop",
    "word": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "limit": "length",
    "max_tokens": "length",
    "incomplete": "length",
    "tool_use": "tool_calls",
}
"""The Chat Completions word for what the other endpoints call it. Unlisted words stay as they are."""


_CALL = re.compile(r'"type":\s*"function_call"|"call_id":\s*"')
"""A call of a tool, of which long arguments may have left the end alone."""
_UNFINISHED = frozenset({"in_progress", "queued"})
"""What a response says of itself on its way."""


def usage_in(label: str, head: str, tail: str) -> Usage:
    """`label` is the endpoint's. Counts are None where the answer did not tell, or not legibly."""
    # An answer in one piece may say before its text why that ended; a stream says so at its end alone.
    finish = _finish(label, tail) or _finish(label, head)
    timings = _last_object("timings", tail)
    if "cache_n" in timings and "prompt_n" in timings:
        counts = (timings.get("prompt_n"), timings.get("cache_n"), timings.get("predicted_n"))
    elif label == "messages":
        counts = _message_counts(head, tail)
    else:
        counts = _openai_counts(_last_object("usage", tail))
    computed, reused, generated = counts
    return Usage(_count(computed), _count(reused), _count(generated), finish)


def _last_object(key: str, text: str) -> Mapping[str, Any]:
    return next(_objects(key, text), {})


def _objects(key: str, text: str) -> Iterator[Mapping[str, Any]]:
    """The objects under `key`, last first.

    Inside a JSON string the quotes around the key would be escaped, so what a model wrote never matches.
    """
    needle = f'"{key}":'
    position = text.rfind(needle)
    while position >= 0:
        start = text.find("{", position)
        if start >= 0 and not text[position + len(needle) : start].strip():
            try:
                yield _DECODER.raw_decode(text, start)[0]
            except ValueError:  # cut off where the stream broke
                pass
        position = text.rfind(needle, 0, position)


def _openai_counts(usage: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
    details = _map(usage.get("prompt_tokens_details", usage.get("input_tokens_details")))
    cached = _count(details.get("cached_tokens"))
    generated = usage.get("completion_tokens", usage.get("output_tokens"))
    if prompt is None or cached is None:
        return None, None, generated
    return prompt - cached, cached, generated


def _message_counts(head: str, tail: str) -> tuple[Any, Any, Any]:
    """`input_tokens` are those not in the cache. A stream gives the prompt's counts at its start."""
    generated = _last_object("usage", tail).get("output_tokens")
    for usage in (*_objects("usage", tail), *_objects("usage", head)):
        if "input_tokens" in usage:
            return usage["input_tokens"], usage.get("cache_read_input_tokens"), generated
    return None, None, generated


def _count(value: object) -> int | None:
    # The parser makes plain integers, and a bool is none.
    return value if type(value) is int else None


def _finish(label: str, text: str) -> str | None:
    if label == "responses":
        return _response_finish(text)
    words = _FINISH.findall(text)
    return _FINISHES.get(words[-1], words[-1]) if words else None


def _response_finish(text: str) -> str | None:
    """The Responses API has a status, and calls tools by items of the output."""
    response = _last_object("response", text) or _whole(text)
    if not response:
        return _cut_response_finish(text)
    status, output = response.get("status"), response.get("output")
    if not isinstance(status, str) or status in _UNFINISHED:
        return None
    items = output if isinstance(output, list) else []
    if status == "completed" and any(_map(item).get("type") == "function_call" for item in items):
        return "tool_calls"
    return _FINISHES.get(status, status)


def _cut_response_finish(text: str) -> str | None:
    """Of a response longer than what is kept, whose end says how much it took and not how it ended."""
    if "input_tokens" not in _last_object("usage", text):
        return None
    return "tool_calls" if _CALL.search(text) else "stop"


def _whole(text: str) -> Mapping[str, Any]:
    try:
        return _map(json.loads(text))
    except ValueError:  # a stream, or longer than what was kept
        return {}


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
