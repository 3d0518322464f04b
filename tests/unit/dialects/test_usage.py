"""What an answer says of its prompt; how it is kept from a stream is tested with the tap."""

from __future__ import annotations

import orjson
import pytest

from kvproxy.dialects.usage import usage_in
from kvproxy.upstream.replies import Usage

TIMINGS = {"cache_n": 24, "prompt_n": 1, "predicted_n": 3}


def event(document: object) -> str:
    return f"data: {orjson.dumps(document).decode()}\n\n"


@pytest.mark.parametrize("label", ["chat/completions", "completions", "completion", "responses", "messages"])
def test_timings_are_believed_wherever_they_stand(label: str) -> None:
    usage = usage_in(label, "", event({"timings": TIMINGS}))
    assert (usage.computed, usage.reused, usage.generated) == (1, 24, 3)


def test_a_message_stream_tells_its_prompt_first_and_its_reply_last() -> None:
    head = event({"message": {"usage": {"input_tokens": 1, "cache_read_input_tokens": 24}}})
    tail = event({"delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}})
    assert usage_in("messages", head, tail) == Usage(1, 24, 3, "tool_calls")


def test_a_response_tells_by_its_output_that_it_calls_tools() -> None:
    usage = {"input_tokens": 25, "input_tokens_details": {"cached_tokens": 24}, "output_tokens": 3}
    whole = {"status": "completed", "output": [{"type": "function_call"}], "usage": usage}
    assert usage_in("responses", "", event({"response": whole})) == Usage(1, 24, 3, "tool_calls")


def test_what_tells_nothing_is_none_throughout() -> None:
    assert usage_in("chat/completions", "", "no json") == Usage(None, None, None, None)
