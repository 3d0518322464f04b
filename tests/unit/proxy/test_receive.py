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


@pytest.mark.parametrize("rest", [b"\0", b"\0\0", b'\0{"prompt":"c"}', b"\0\xff"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
async def test_a_body_is_read_up_to_a_nul_as_the_server_does(mark: bytes, rest: bytes) -> None:
    assert await parse_object(mark + b'{"prompt":["a","b"]}' + rest) == {"prompt": ["a", "b"]}
    assert await parse_object(mark + rest) is None


def nested(levels: int, opening: bytes, closing: bytes) -> bytes:
    return opening * levels + b"1" + closing * levels


DEEP = {
    "a prompt": (b'"prompt":', nested(1000, b"[", b"]"), "completion"),
    "tools": (b'"messages":[{"role":"user"}],"tools":', nested(1000, b"[", b"]"), "chat/completions"),
    "results": (
        b'"messages":',
        nested(330, b'[{"role":"user","content":', b"}]"),
        "messages",
    ),
}


@pytest.mark.parametrize(("name", "value", "label"), DEEP.values(), ids=DEEP)
async def test_what_is_nested_too_deep_to_be_told_is_read_for_what_it_asks(
    name: bytes, value: bytes, label: str
) -> None:
    reading = await understand(b"{" + name + value + b',"id_slot":0,"stream":true}', label)
    assert reading is not None
    assert reading.is_stream
    assert reading.document["id_slot"] == 0
