"""Which fields pass, and which are added."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvproxy.errors import ReplyError
from kvproxy.proxy.headers import client_headers, upstream_headers

Pairs = list[tuple[str, str]]


def raw(*pairs: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in pairs]


def text(fields: Iterable[tuple[bytes, bytes]]) -> Pairs:
    return [(name.decode(), value.decode("latin-1")) for name, value in fields]


def sent(*pairs: tuple[str, str], api_key: str | None = None, trusted: bool = False) -> Pairs:
    headers = upstream_headers(
        raw(*pairs),
        peer="192.0.2.7",
        scheme="http",
        host="proxy:8090",
        api_key=api_key,
        is_peer_trusted=trusted,
    )
    return text(headers)


def without_own(pairs: Iterable[tuple[str, str]]) -> Pairs:
    return [p for p in pairs if p[0] != "Via" and not p[0].startswith("X-Forwarded-")]


HOPS = ["Connection", "Keep-Alive", "TE", "Trailer", "Transfer-Encoding", "Upgrade", "Proxy-Connection"]


@pytest.mark.parametrize("name", [*HOPS, "Proxy-Authorization", "proxy-authenticate", "KEEP-ALIVE"])
def test_what_ends_at_this_hop_is_dropped_both_ways(name: str) -> None:
    pairs = (("A", "1"), (name, "x"), ("B", "2"))
    assert without_own(sent(*pairs)) == [("A", "1"), ("B", "2")]
    assert list(client_headers(raw(*pairs)).items()) == [("A", "1"), ("B", "2")]


def test_every_field_that_any_connection_line_names_is_dropped() -> None:
    pairs = (("Connection", "close, X-One"), ("x-ONE", "1"), ("connection", " x-two ,"), ("X-Two", "2"))
    assert without_own(sent(*pairs)) == []
    assert list(client_headers(raw(*pairs))) == []


def test_no_connection_token_takes_away_who_asks_or_how_long_the_message_is() -> None:
    kept = (
        ("Authorization", "Bearer k"),
        ("X-Api-Key", "k"),
        ("Cookie", "a=b"),
        ("Content-Length", "3"),
        ("Content-Type", "application/json"),
    )
    tokens = "authorization, host, x-api-key, cookie, content-length, content-type, x-forwarded-for"
    assert without_own(sent(("Connection", tokens), *kept)) == list(kept)
    assert "X-Forwarded-For" in dict(sent(("Connection", tokens)))
    answer = raw(("Connection", "Set-Cookie, Content-Length"), ("Set-Cookie", "a"), ("Content-Length", "1"))
    assert list(client_headers(answer)) == ["Set-Cookie", "Content-Length"]


def test_order_number_case_and_empty_values_are_kept() -> None:
    pairs = (("X-A", "1"), ("x-b", ""), ("X-A", "2"), ("accept", "a"), ("X-a", "1"))
    assert without_own(sent(*pairs)) == list(pairs)
    cookies = (
        ("Set-Cookie", "a=1"),
        ("Access-Control-Allow-Origin", ""),
        ("Set-Cookie", "b=2"),
        ("Set-Cookie", "a=1"),
    )
    assert list(client_headers(raw(*cookies)).items()) == list(cookies)


def test_nothing_is_invented_towards_the_upstream_but_what_a_gateway_owes() -> None:
    assert sent() == [
        ("Via", "1.1 kvproxy"),
        ("X-Forwarded-For", "192.0.2.7"),
        ("X-Forwarded-Proto", "http"),
        ("X-Forwarded-Host", "proxy:8090"),
    ]


def test_our_own_request_headers_and_expect_and_host_stay_here() -> None:
    pairs = (
        ("X-KVProxy-Bypass", "1"),
        ("x-kvproxy-purpose", "main"),
        ("Expect", "100-continue"),
        ("Host", "p"),
    )
    assert without_own(sent(*pairs)) == []


def test_session_headers_of_clients_go_on() -> None:
    pairs = (("X-Session-Id", "s"), ("X-Conversation-Id", "c"), ("x-stainless-retry-count", "1"))
    assert without_own(sent(*pairs)) == list(pairs)


def test_an_upstream_key_replaces_the_clients_key_in_either_header() -> None:
    pairs = (("Authorization", "Bearer client"), ("X-API-Key", "client"), ("Authorization", "again"))
    result = sent(*pairs, api_key="server")
    assert without_own(result) == [("Authorization", "Bearer server")]
    assert "client" not in str(result)


def test_without_an_upstream_key_the_clients_key_goes_on() -> None:
    assert ("Authorization", "Bearer client") in sent(("Authorization", "Bearer client"))


def test_a_chain_from_a_stranger_is_not_believed() -> None:
    pairs = (("X-Forwarded-For", "10.0.0.1"), ("X-Forwarded-Proto", "https"), ("X-Forwarded-Host", "evil"))
    result = dict(sent(*pairs))
    assert result["X-Forwarded-For"] == "192.0.2.7"
    assert (result["X-Forwarded-Proto"], result["X-Forwarded-Host"]) == ("http", "proxy:8090")


def test_a_chain_from_a_trusted_peer_is_continued() -> None:
    pairs = (
        ("X-Forwarded-For", "10.0.0.1"),
        ("X-Forwarded-Proto", "https"),
        ("x-forwarded-for", "::1 , 10.0.0.2"),
    )
    result = sent(*pairs, trusted=True)
    assert ("X-Forwarded-For", "10.0.0.1, ::1, 10.0.0.2, 192.0.2.7") in result
    assert ("X-Forwarded-Proto", "https") in result


@pytest.mark.parametrize("chain", ["unknown", "10.0.0.1,,", "10.0.0.1;x", "999.1.1.1", "a\tb"])
def test_a_malformed_chain_is_not_continued(chain: str) -> None:
    assert dict(sent(("X-Forwarded-For", chain), trusted=True))["X-Forwarded-For"] == "192.0.2.7"


def test_a_client_without_an_address_gets_no_chain() -> None:
    headers = upstream_headers([], peer=None, scheme="http", host=None)
    assert [name for name, _ in headers] == [b"Via", b"X-Forwarded-Proto"]


def test_a_request_that_passed_twice_is_a_loop() -> None:
    assert ("Via", "1.1 kvproxy") in sent(("Via", "1.0 fred, 1.1 KVPROXY (x)"))
    with pytest.raises(ReplyError) as caught:
        sent(("Via", "1.1 kvproxy, 1.1 other"), ("via", "1.1 kvproxy"))
    assert caught.value.status == 508


def test_the_via_of_others_is_kept_before_ours() -> None:
    values = [value for name, value in sent(("Via", "1.0 fred")) if name == "Via"]
    assert values == ["1.0 fred", "1.1 kvproxy"]


def test_a_value_that_could_not_be_sent_as_it_came_is_not_sent() -> None:
    pairs = [
        (b"X-Latin", b"caf\xe9"),
        (b"X-Utf8", "café".encode()),
        (b"X-Control", b"a\x01b"),
        (b"X-Empty", b""),
        (b"X-Tab", b"a\tb"),
    ]
    kept = [("X-Utf8", "café"), ("X-Empty", ""), ("X-Tab", "a\tb")]
    assert list(client_headers(pairs).items()) == kept


def test_bytes_of_any_alphabet_go_upstream_as_they_came_but_no_control_characters() -> None:
    pairs = [(b"X-Latin", b"caf\xe9"), (b"X-Control", b"a\x01b"), (b"X-Tab", b"a\tb")]
    headers = upstream_headers(pairs, peer=None, scheme="http", host=None)
    assert [pair for pair in headers if pair in pairs] == [pairs[0], pairs[2]]


def test_a_length_beside_chunks_is_dropped() -> None:
    answer = raw(("Content-Length", "5"), ("Transfer-Encoding", "chunked"), ("X", "1"))
    assert list(client_headers(answer)) == ["X"]
    assert list(client_headers(raw(("Content-Length", "5")))) == ["Content-Length"]
