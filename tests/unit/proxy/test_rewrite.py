"""`splice` adds two fields before the final brace and leaves every other byte alone."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.identifiers import SlotId
from kvproxy.proxy.rewrite import BOM, can_splice, splice

FIELDS = b'"id_slot":3,"cache_prompt":true'

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
json_objects = st.dictionaries(st.text(), json_values)
spaces = st.text(alphabet=" \t\r\n", max_size=5).map(str.encode)


def spliced(body: bytes) -> bytes:
    result = splice(body, SlotId(3))
    assert result is not None
    return result


@given(json_objects, spaces, spaces, spaces, st.sampled_from([b"", BOM]))
def test_removing_the_splice_gives_the_body_as_it_was(
    document: dict[str, object], before: bytes, inside: bytes, after: bytes, mark: bytes
) -> None:
    text = orjson.dumps(document)
    body = mark + before + text[:-1] + inside + b"}" + after

    result = spliced(body)

    added = FIELDS if not document else b"," + FIELDS
    end = len(result) - len(after) - 1 - len(added)
    assert result[end : end + len(added)] == added
    assert result[:end] + result[end + len(added) :] == body


@given(json_objects, spaces)
def test_a_spliced_body_is_the_same_object_with_the_two_fields(
    document: dict[str, object], after: bytes
) -> None:
    result = orjson.loads(spliced(orjson.dumps(document) + after))
    assert result == orjson.loads(orjson.dumps(document)) | {"id_slot": 3, "cache_prompt": True}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b"{" + FIELDS + b"}"),
        (b"{ \n}", b"{ \n" + FIELDS + b"}"),
        (b'{"a":1}', b'{"a":1,' + FIELDS + b"}"),
        (b'{"a":"}"}\r\n ', b'{"a":"}",' + FIELDS + b"}\r\n "),
        (b'{"a":{"b":{}}}', b'{"a":{"b":{}},' + FIELDS + b"}"),
        (
            b'{"x":1e3,"n":123456789012345678901234}',
            b'{"x":1e3,"n":123456789012345678901234,' + FIELDS + b"}",
        ),
        (b'{"e":"\\u00e9\\/"}', b'{"e":"\\u00e9\\/",' + FIELDS + b"}"),
        (b"\xef\xbb\xbf{}", b"\xef\xbb\xbf{" + FIELDS + b"}"),
    ],
)
def test_the_fields_stand_before_the_final_brace(body: bytes, expected: bytes) -> None:
    assert spliced(body) == expected


def test_our_fields_come_after_the_clients_own_so_that_they_win() -> None:
    result = spliced(b'{"id_slot":0,"cache_prompt":false,"id_slot":1}')
    assert result == b'{"id_slot":0,"cache_prompt":false,"id_slot":1,' + FIELDS + b"}"


@pytest.mark.parametrize(
    "body", [b"", b" ", b"[]", b'"}"', b"}", b"{", b"null", b'{"a":1,}', b"{,}", b"\xef\xbb\xbf"]
)
def test_what_is_no_object_is_not_touched(body: bytes) -> None:
    assert splice(body, SlotId(0)) is None


@pytest.mark.parametrize("spaces", [b"", b"\n", b" " * 4095, b" " * 4096, b"\t" * 10_000])
def test_any_white_space_around_a_brace_is_looked_past(spaces: bytes) -> None:
    assert spliced(spaces + b"{}" + spaces) == spaces + b"{" + FIELDS + b"}" + spaces
    assert spliced(b"{" + spaces + b"}") == b"{" + spaces + FIELDS + b"}"
    assert spliced(b'{"a":1' + spaces + b"}") == b'{"a":1' + spaces + b"," + FIELDS + b"}"
    assert splice(spaces + b"}" + spaces, SlotId(0)) is None


@pytest.mark.parametrize("rest", [b"\0", b"\0\0 ", b'\0{"a":1}', b"\0}"])
def test_behind_a_nul_the_server_reads_nothing(rest: bytes) -> None:
    assert spliced(b'{"a":1}' + rest) == b'{"a":1,' + FIELDS + b"}" + rest
    assert spliced(b"{} " + rest) == b"{" + FIELDS + b"} " + rest
    assert splice(b'{"a":' + rest, SlotId(0)) is None


def test_a_request_that_owns_nothing_keeps_its_own_word_on_caching() -> None:
    body = b'{"cache_prompt":false}'
    assert splice(body, SlotId(3), cache_prompt=None) == b'{"cache_prompt":false,"id_slot":3}'


def test_one_that_may_use_nothing_of_its_slot_says_so_whatever_its_client_does() -> None:
    body = b'{"cache_prompt":true}'
    spliced = b'{"cache_prompt":true,"id_slot":3,"cache_prompt":false}'
    assert splice(body, SlotId(3), cache_prompt=False) == spliced


def test_what_can_be_spliced_is_known_before() -> None:
    for body in (b"{}", b'{"a":1} ', b"\xef\xbb\xbf{}", b"[]", b"{", b'{"a":1}\0', b"\0{}", b"", b'{"a":1,}'):
        assert can_splice(body) == (splice(body, SlotId(0)) is not None)
