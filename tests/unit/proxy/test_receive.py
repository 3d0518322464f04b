"""Reading a body as JSON; how it is received over a socket is tested with the relay."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.proxy.receive import THREAD_BYTES, understand


async def parse_object(body: bytes, content_encoding: str | None = None) -> Any:
    reading = await understand(body, "completion", content_encoding)
    return None if reading is None else reading.document


async def test_an_object_is_read_with_the_last_of_duplicate_keys() -> None:
    assert await parse_object(b' {"a":1,"a":2} ') == {"a": 2}


async def test_a_byte_order_mark_is_read_past_as_the_server_does() -> None:
    assert await parse_object(b'\xef\xbb\xbf{"a":1}') == {"a": 1}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"text"',
        b"null",
        b"{",
        b'{"a":NaN}',
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b'{"a":1}{}',
        b'{"a":' + b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b"\xef\xbb\xbf",
        b"\x1f\x8b\x08binary",
    ],
)
async def test_what_is_no_readable_object_is_none(body: bytes) -> None:
    assert await parse_object(body) is None


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
async def test_an_encoded_body_is_not_looked_into(encoding: str) -> None:
    assert await parse_object(b"{}", encoding) is None


async def test_an_unencoded_body_may_say_so() -> None:
    assert await parse_object(b"{}", "identity") == {}
    assert await parse_object(b"{}", " Identity") == {}
    assert await parse_object(b"{}", "") == {}


async def test_a_large_body_is_read_like_a_small_one() -> None:
    body = b'\xef\xbb\xbf{"a":"' + b"x" * THREAD_BYTES + b'"}'
    document = await parse_object(body)
    assert document is not None
    assert len(document["a"]) == THREAD_BYTES


async def test_a_body_is_read_up_to_a_closing_nul_as_the_server_does() -> None:
    assert await parse_object(b'{"prompt":["a","b"]}\0') == {"prompt": ["a", "b"]}


@pytest.mark.parametrize(
    ("label", "body"),
    [
        ("chat/completions", b'{"messages":[{"content":' + b"[" * 1015 + b"]" * 1015 + b"}]}"),
        ("chat/completions", b'{"tools":' + b"[" * 1015 + b"]" * 1015 + b',"messages":[]}'),
        ("completion", b'{"prompt":' + b"[" * 1015 + b"1" + b"]" * 1015 + b"}"),
    ],
)
async def test_what_is_nested_deeper_than_can_be_looked_into_is_none(label: str, body: bytes) -> None:
    assert await understand(body, label) is None


async def test_a_prompt_that_cannot_be_written_again_is_understood_but_for_what_it_says() -> None:
    reading = await understand(b'{"prompt":[1,' + b"[" * 300 + b"]" * 300 + b"]}", "completion")
    assert reading is not None
    assert list(reading.document) == ["prompt"]
