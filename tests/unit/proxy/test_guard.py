"""Host list and management routes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.proxy.guard import Target, check_host, forbidden, origin_form

LOCAL = ("localhost", "127.0.0.1", "[::1]")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8090", "127.0.0.1:1", "[::1]", "[::1]:8090", "[0:0::1]"]
)
def test_listed_hosts_pass_with_any_port_and_case(host: str) -> None:
    assert check_host(host, LOCAL)


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        " ",
        ":8090",
        "evil.example",
        "localhost.evil.example",
        "localhost:8090:1",
        "localhost:port",
        "user@localhost",
        "localhost/",
        "localhost evil",
        "localhost.",
        "[::1",
        "::1",
        "[localhost]",
        "127.0.0.1.evil.example",
        "127.1",
        "2130706433",
    ],
)
def test_everything_else_is_refused(host: str | None) -> None:
    assert not check_host(host, LOCAL)


def test_an_entry_with_a_port_asks_for_that_port() -> None:
    assert check_host("kv.lan:80", ["kv.lan:80"])
    assert not check_host("kv.lan:81", ["kv.lan:80"])
    assert not check_host("kv.lan", ["kv.lan:80"])


def test_an_ipv6_entry_may_come_without_brackets() -> None:
    assert check_host("[FE80::1]:9", ["fe80::1"])


def test_a_star_allows_all_hosts_and_an_empty_list_none() -> None:
    assert check_host(None, ["*"])
    assert not check_host("localhost", [])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/slots/0?action=save"),
        ("POST", "/slots"),
        ("POST", "/props"),
        ("POST", "/lora-adapters"),
        ("POST", "/models"),
        ("DELETE", "/models?name=x"),
        ("POST", "/models/load"),
        ("GET", "/models/unload"),
        ("GET", "/cors-proxy?url=http://x"),
        ("POST", "/tools"),
        ("GET", "/tools"),
        ("PUT", "/slots/0"),
    ],
)
def test_management_routes_are_shut(method: str, path: str) -> None:
    assert forbidden(method, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/props"),
        ("GET", "/slots"),
        ("GET", "/models"),
        ("GET", "/v1/models"),
        ("GET", "/lora-adapters"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/slotsx"),
        ("POST", "/v1/slots-are-fun"),
        ("POST", "/tokenize"),
        ("DELETE", "/v1/stream?id=1"),
        ("GET", "/"),
        ("OPTIONS", "/props"),
        ("POST", "/completion?next=/slots/0"),
    ],
)
def test_all_other_routes_are_open(method: str, path: str) -> None:
    assert not forbidden(method, path)


@pytest.mark.parametrize(
    "path",
    [
        "/slots/0/",
        "//slots/0",
        "/slots//0",
        "/./slots/0",
        "/x/../slots/0",
        "/../slots/0",
        "/sl%6fts/0",
        "/sl%6Fts/0",
        "/sl%u006fts/0",
        "/sl%u006Fts/0",
        "/slots%u002f0",
        "/slots%2%u00660",
        "/slots%2f0",
        "/slots%2F0",
        "/%2e%2e/slots/0",
        "/x/%2e%2E/slots/0",
        "/slots/0%00",
        "/slots/0%00x",
        "/slots/0%23",
        "/slots/0#x",
        "/SLOTS/0",
        "\\slots\\0",
        "/%5cslots/0",
        "/slots;x/0",
        "/%73%6c%6f%74%73/0",
        "/%2573lots/0",
        "/slots%20/0",
        "http://localhost:8090/slots/0",
        "HTTP://evil/slots/0?action=erase",
        "http://localhost/x/..%2fslots/0",
    ],
)
def test_no_spelling_of_a_shut_route_opens_it(path: str) -> None:
    assert forbidden("POST", path)


def encoded(char: str, style: int) -> str:
    """One of the ways to write `char` that some server on the way may undo."""
    byte = f"{ord(char):02x}"
    return [char, f"%{byte}", f"%{byte.upper()}", f"%25{byte}", char.upper(), f"%u00{byte}"][style]


@given(
    st.sampled_from(["/slots/0", "/props", "/models/load", "/cors-proxy", "/tools"]),
    st.lists(st.integers(0, 5), min_size=20, max_size=20),
    st.sampled_from(["", "/", "/.", "/x/..", "//", "/%2e", "\\"]),
    st.sampled_from(["", "/", "?a=b", "%00", "#", ";v=1", "/."]),
)
def test_mixed_spellings_stay_shut(path: str, styles: list[int], before: str, after: str) -> None:
    written = "".join(encoded(c, s) for c, s in zip(path, styles, strict=False))
    assert forbidden("POST", before + written + after)


def test_with_keys_the_slots_cannot_be_read_either() -> None:
    assert forbidden("GET", "/slots", has_api_keys=True)
    assert forbidden("GET", "/sl%6fts/?x", has_api_keys=True)
    assert not forbidden("GET", "/props", has_api_keys=True)


@pytest.mark.parametrize(
    ("raw", "target"),
    [
        ("/a%2Fb?x=%20", Target("/a%2Fb?x=%20", None)),
        ("http://h:1/a?b", Target("/a?b", "h:1")),
        ("http://h", Target("/", "h")),
        ("HTTP://H?q", Target("/?q", "H")),
        ("*", Target("*", None)),
        ("//h/a", Target("//h/a", None)),
        ("/http://x/", Target("/http://x/", None)),
    ],
)
def test_the_absolute_form_gives_path_and_authority(raw: str, target: Target) -> None:
    assert origin_form(raw) == target
