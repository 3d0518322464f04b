from __future__ import annotations

import pytest

from kvproxy.settings.address import Address, check_key, check_url, parse_address


@pytest.mark.parametrize("text", ["127.0.0.1:8090", "[::1]:8090", "localhost:0", "[fe80::1%eth0]:80"])
def test_an_address_is_written_as_it_was_read(text: str) -> None:
    assert str(parse_address(text)) == text


def test_an_ipv6_host_is_held_without_brackets() -> None:
    assert parse_address("[::1]:8090") == Address("::1", 8090)


@pytest.mark.parametrize(
    "value",
    ["", ":8090", "host", "host:", "host:x", "host:-1", "host:65536", "::1:80", "a b:1", "h/:1", 8090, None],
)
def test_what_is_no_address_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_address(value)


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("https://gpu.example", "https://gpu.example"),
        ("http://[::1]:9", "http://[::1]:9"),
        ("http://gpu_1.example.:80", "http://gpu_1.example.:80"),
        ("http://b\u00fcro", "http://b\u00fcro"),
    ],
)
def test_an_upstream_is_named_by_its_origin(url: str, origin: str) -> None:
    assert check_url(url) == origin


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://h", "http"),
        ("127.0.0.1:8080", "http"),
        ("http://", "no host"),
        ("http://h/v1", "no path"),
        ("http://h?x=1", "no query"),
        ("http://h#x", "no query"),
        ("http://u:p@h", "no user"),
        ("http://h:99999", "no URL"),
        ("http://h:0", "port"),
        ("http://a b", "white space"),
        ("http://[::1", "no URL"),
        ("http://a..b", "cannot exist"),
        (f"http://{'a' * 64}.example", "cannot exist"),
        ("http://\u00fc..example", "cannot exist"),
    ],
)
def test_what_names_more_or_less_than_an_origin_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_url(url)


@pytest.mark.parametrize("key", ["sk-1", "open sesame", "geheim-\u00e4", "\u65e5\u672c"])
def test_a_key_may_be_any_text_of_one_line(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("secret\n", "line break"),
        (" secret", "white space"),
        (" ", "white space"),
        ("sec\r\nret", "line break"),
        ("sec\0ret", "control"),
        ("secret\udcff", "UTF-8"),
    ],
)
def test_a_key_that_no_header_can_carry_is_refused_and_not_told(key: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as told:
        check_key(key)
    assert "sec" not in str(told.value)
