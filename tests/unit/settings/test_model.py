from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvproxy.settings import model
from kvproxy.settings.model import MASK, Section, SessionSettings, Settings, UpstreamSettings


def settings(**sections: Any) -> Settings:
    return Settings.model_validate({"state_dir": "/s", **sections})


def every_section() -> list[type[Section]]:
    return [kind for kind in vars(model).values() if isinstance(kind, type) and issubclass(kind, Section)]


@pytest.mark.parametrize("section", every_section())
def test_every_field_is_described_and_every_number_is_bounded(section: type[Section]) -> None:
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name}"
        if field.annotation in (int, float, int | None, float | None):
            bounds = {type(bound).__name__ for bound in field.metadata}
            assert bounds & {"Ge", "Gt"}, f"{section.__name__}.{name} has no lower bound"
            assert bounds & {"Le", "Lt"}, f"{section.__name__}.{name} has no upper bound"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        settings().server.drain_seconds = 1  # type: ignore[misc]


def test_a_word_is_no_boolean_and_a_quoted_number_no_number() -> None:
    for section in ({"on_turn": "yes"}, {"min_tokens": "3"}, {"min_tokens": True}, {"timeout_seconds": "1"}):
        with pytest.raises(ValidationError):
            settings(checkpoint=section)


def test_whole_seconds_may_be_written_without_a_point() -> None:
    assert settings(checkpoint={"timeout_seconds": 7}).checkpoint.timeout_seconds == 7.0


def test_two_upstreams_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="same name"):
        settings(upstreams=[{}, {}])


def test_no_upstream_at_all_is_refused() -> None:
    with pytest.raises(ValidationError):
        settings(upstreams=[])


def test_session_headers_are_held_in_lower_case() -> None:
    assert SessionSettings(headers=("X-Chat",)).headers == ("x-chat",)


@pytest.mark.parametrize(
    "header", ["", "a b", "x:y", "Authorization", "Cookie", "X-Api-Key", "X-Request-Id", "mcp-session-id"]
)
def test_a_header_that_is_none_or_means_no_conversation_is_refused(header: str) -> None:
    with pytest.raises(ValidationError):
        SessionSettings(headers=(header,))


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a b", "a..b"])
def test_a_field_of_the_body_is_a_name_or_names_joined_by_dots(path: str) -> None:
    with pytest.raises(ValidationError):
        SessionSettings(body_fields=(path,))
    assert SessionSettings(body_fields=("chat.id",)).body_fields == ("chat.id",)


@pytest.mark.parametrize("host", ["*", "[::1]", "GPU.example"])
def test_hosts_are_names_addresses_or_any(host: str) -> None:
    assert settings(security={"allowed_hosts": [host]}).security.allowed_hosts == (host.lower(),)


@pytest.mark.parametrize("host", ["", "h:80", "http://h", "::1", "*.example"])
def test_a_host_with_port_or_scheme_is_refused(host: str) -> None:
    with pytest.raises(ValidationError):
        settings(security={"allowed_hosts": [host]})


def test_a_folder_is_absolute_and_knows_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    upstream = UpstreamSettings.model_validate({"snapshot_dir": "~/slots"})
    assert upstream.snapshot_dir == Path("/home/someone/slots")
    assert UpstreamSettings.model_validate({"snapshot_dir": "slots"}).snapshot_dir == Path.cwd() / "slots"


def test_the_masked_dump_shows_no_secret_and_everything_else() -> None:
    shown = settings(
        upstreams=[{"api_key": "k-1"}], admin={"token": "t-2"}, security={"api_keys": ["k-3"]}
    ).masked()
    assert (
        shown["upstreams"][0]["api_key"] == shown["admin"]["token"] == shown["security"]["api_keys"] == MASK
    )
    assert shown["server"]["listen"] == "127.0.0.1:8090"
    assert not any(secret in str(shown) for secret in ("k-1", "t-2", "k-3"))


def test_an_unset_secret_is_shown_as_unset() -> None:
    assert settings().masked()["admin"]["token"] is None


def test_the_repr_of_settings_shows_no_secret() -> None:
    shown = repr(settings(upstreams=[{"api_key": "k-1"}], admin={"token": "t-2"}))
    assert "k-1" not in shown
    assert "t-2" not in shown
