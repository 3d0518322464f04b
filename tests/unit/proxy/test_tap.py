"""What is read of an answer, and that nothing but a little of it is kept."""

from __future__ import annotations

from collections.abc import Iterable

import orjson
import pytest

from kvproxy.proxy.tap import HEAD_BYTES, TAIL_BYTES, Tap
from kvproxy.upstream.replies import Usage


class StillClock:
    def __init__(self) -> None:
        self.time = 5.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


def tapped(chunks: Iterable[bytes], encoding: str | None = None) -> Tap:
    tap = Tap(StillClock())
    tap.begin(encoding)
    for chunk in chunks:
        tap.feed(chunk)
    return tap


def usage(label: str, *documents: object, filler: int = 0) -> Usage:
    """Of a stream with these events; `filler` bytes of others come after the first."""
    events = [b"data: " + orjson.dumps(document) + b"\n\n" for document in documents]
    delta = b'data: {"choices":[{"finish_reason":null,"delta":{"content":"word"}}]}\n\n'
    events[1:1] = [delta] * (filler // len(delta))
    return tapped(events).usage(label)


TIMINGS = {"cache_n": 24, "prompt_n": 1, "prompt_ms": 0.4, "predicted_n": 3}
FULL = Usage(computed=1, reused=24, generated=3, finish_reason="stop")
CHAT_END = {"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}], "timings": TIMINGS}
MESSAGE_START = {
    "type": "message_start",
    "message": {
        "stop_reason": None,
        "usage": {"cache_read_input_tokens": 24, "input_tokens": 1, "output_tokens": 0},
    },
}
MESSAGE_END = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}


def test_a_chat_stream_tells_its_counts_in_the_last_event() -> None:
    assert usage("chat/completions", {"choices": []}, CHAT_END) == FULL


def test_the_last_timings_count() -> None:
    early = {"timings": TIMINGS | {"cache_n": 0, "predicted_n": 1}}
    assert usage("chat/completions", early, CHAT_END) == FULL


def test_counts_are_found_however_the_stream_is_cut() -> None:
    whole = b"data: " + orjson.dumps(CHAT_END) + b"\n\ndata: [DONE]\n\n"
    for size in (1, 2, 7):
        chunks = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert tapped(chunks).usage("chat/completions") == FULL


def test_what_the_model_wrote_is_not_taken_for_counts() -> None:
    lie = '"timings":{"cache_n":9,"prompt_n":9},"finish_reason":"tool_calls"'
    text = {"choices": [{"finish_reason": None, "delta": {"content": lie}}]}
    assert usage("chat/completions", CHAT_END, text) == FULL


def test_a_plain_completion_tells_them_in_its_body() -> None:
    body = {"content": "x", "stop_type": "limit", "tokens_cached": 6, "timings": TIMINGS}
    assert tapped([orjson.dumps(body)]).usage("completion") == Usage(1, 24, 3, "length")


def test_without_timings_the_openai_usage_is_read() -> None:
    numbers = {"prompt_tokens": 25, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 24}}
    body = {"choices": [{"finish_reason": "stop"}], "usage": numbers}
    assert tapped([orjson.dumps(body)]).usage("chat/completions") == FULL


def test_usage_without_cached_tokens_tells_no_split() -> None:
    body = {"usage": {"prompt_tokens": 25, "completion_tokens": 3}}
    assert tapped([orjson.dumps(body)]).usage("chat/completions") == Usage(None, None, 3, None)


def test_a_null_usage_is_passed_over() -> None:
    assert usage("chat/completions", CHAT_END, {"usage": None, "timings": None}) == FULL


def test_a_message_stream_tells_its_prompt_at_the_head() -> None:
    result = usage("messages", MESSAGE_START, MESSAGE_END, filler=2 * TAIL_BYTES)
    assert result == FULL


def test_a_whole_message_tells_all_in_its_body() -> None:
    numbers = {"cache_read_input_tokens": 24, "input_tokens": 1, "output_tokens": 3}
    body = {"type": "message", "stop_reason": "end_turn", "usage": numbers}
    assert tapped([orjson.dumps(body)]).usage("messages") == FULL


RESPONSE = {
    "status": "completed",
    "output": [{"type": "message", "status": "completed"}],
    "usage": {"input_tokens": 25, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 24}},
}


def test_a_response_tells_usage_in_its_body_and_timings_in_its_last_event() -> None:
    assert tapped([orjson.dumps(RESPONSE)]).usage("responses") == FULL
    done = {"type": "response.completed", "response": RESPONSE, "timings": TIMINGS}
    started = {"type": "response.created", "response": {"status": "in_progress"}}
    assert usage("responses", started, done) == FULL


@pytest.mark.parametrize(
    ("label", "body", "finish"),
    [
        ("chat/completions", {"choices": [{"finish_reason": "tool_calls"}]}, "tool_calls"),
        ("chat/completions", {"choices": [{"finish_reason": "length"}]}, "length"),
        ("completion", {"stop_type": "eos"}, "stop"),
        ("completion", {"stop_type": "word"}, "stop"),
        ("messages", {"stop_reason": "tool_use"}, "tool_calls"),
        ("messages", {"stop_reason": "max_tokens"}, "length"),
        ("messages", {"stop_reason": "refusal"}, "refusal"),
        ("responses", RESPONSE | {"output": [{"type": "function_call"}]}, "tool_calls"),
        ("responses", {"status": "incomplete", "output": []}, "length"),
        ("responses", {"status": "in_progress", "output": []}, None),
        ("responses", {"error": {}}, None),
        ("chat/completions", {"error": {}}, None),
    ],
)
def test_how_it_ended_is_told_in_one_vocabulary(label: str, body: object, finish: str | None) -> None:
    assert tapped([orjson.dumps(body)]).usage(label).finish_reason == finish


def test_a_compressed_answer_tells_nothing() -> None:
    tap = tapped([orjson.dumps(CHAT_END)], encoding="gzip")
    assert tap.usage("chat/completions") == Usage(None, None)


def test_a_stream_that_broke_in_its_last_event_tells_what_came_before() -> None:
    broken = [b"data: " + orjson.dumps(CHAT_END), b'\n\ndata: {"timings":{"cache_n":1,"prompt']
    assert tapped(broken).usage("chat/completions") == FULL


def test_an_answer_that_is_no_json_tells_nothing() -> None:
    assert tapped([b"\xff\xfe<html>"]).usage("chat/completions") == Usage(None, None)
    assert tapped([]).usage("messages") == Usage(None, None)


def test_memory_is_bounded_and_chunks_are_not_copied() -> None:
    chunk = b"x" * 1000
    tap = tapped([chunk] * 10_000)
    kept = [*tap._head, *tap._tail]
    assert sum(map(len, kept)) <= HEAD_BYTES + TAIL_BYTES + 2 * len(chunk)
    assert all(piece is chunk for piece in kept)


def test_the_first_byte_has_a_time_and_no_byte_has_none() -> None:
    clock = StillClock()
    tap = Tap(clock)
    tap.begin(None)
    assert tap.first_byte_at is None
    tap.feed(b"a")
    clock.time = 9.0
    tap.feed(b"b")
    assert tap.first_byte_at == 5.0


def test_the_last_of_what_passed_can_be_searched_also_across_pieces() -> None:
    tap = tapped([b'{"error": "it fail', b'ed here"}'])
    assert tap.ended_with(b"failed here")
    assert not tap.ended_with(b"failed there")


CALL = {"type": "function_call", "name": "write", "arguments": '{"text":"\\"type\\":\\"function_call\\""}'}
LONG_CALL = {"type": "function_call", "arguments": "x" * 200_000, "call_id": "call_1", "name": "write"}
WORDS = {
    "type": "message",
    "content": [{"type": "output_text", "text": 'x "type":"function_call" y ' * 5000}],
}


@pytest.mark.parametrize(
    ("items", "finish"), [([WORDS], "stop"), ([WORDS, CALL], "tool_calls"), ([LONG_CALL], "tool_calls")]
)
def test_a_response_longer_than_what_is_kept_tells_how_it_ended(items: list[object], finish: str) -> None:
    counts = {"input_tokens": 25, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 24}}
    whole = {"object": "response", "status": "completed", "output": items, "usage": counts}
    assert len(orjson.dumps(whole)) > 2 * TAIL_BYTES
    expected = Usage(computed=1, reused=24, generated=3, finish_reason=finish)
    completed = {"type": "response.completed", "response": whole}
    assert usage("responses", {"type": "response.created", "response": {}}, completed) == expected
    assert tapped([orjson.dumps(whole)[:4096], orjson.dumps(whole)[4096:]]).usage("responses") == expected


def test_a_long_response_that_broke_off_has_no_end() -> None:
    delta = b'data: {"type":"response.output_text.delta","delta":"word"}\n\n'
    assert tapped([delta] * 3000).usage("responses") == Usage(None, None, None, None)


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "length"])
def test_a_long_answer_in_one_piece_tells_how_it_ended(reason: str) -> None:
    choice = {"finish_reason": reason, "index": 0, "message": {"content": '"finish_reason":"none"' * 9000}}
    body = orjson.dumps({"choices": [choice], "usage": {}, "timings": TIMINGS})
    pieces = [body[start : start + 8192] for start in range(0, len(body), 8192)]
    assert tapped(pieces).usage("chat/completions") == Usage(1, 24, 3, reason)
    assert tapped(pieces[:-1]).usage("chat/completions").prompt is None


def test_a_long_stream_that_broke_off_did_not_end_as_its_beginning_says() -> None:
    begun = {"choices": [{"finish_reason": None, "delta": {"content": "a"}}]}
    assert usage("chat/completions", begun, begun, filler=3 * TAIL_BYTES).finish_reason is None
