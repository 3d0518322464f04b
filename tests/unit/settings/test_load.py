from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvproxy.errors import SettingsError
from kvproxy.settings.load import default_state_dir, load, read, resolve
from kvproxy.settings.overrides import from_assignment

HOME = {"HOME": "/home/someone"}


def test_with_nothing_at_all_it_fronts_the_usual_port_on_loopback() -> None:
    settings = load(environ=HOME)
    assert settings.upstreams[0].url == "http://127.0.0.1:8080"
    assert str(settings.server.listen) == "127.0.0.1:8090"


def test_environment_beats_the_file_and_flags_beat_both(tmp_path: Path) -> None:
    file = tmp_path / "kvproxy.yaml"
    file.write_text("queue: {max_waiting: 1, max_wait_seconds: 1}\ncheckpoint: {min_tokens: 1}\n")
    settings = load(
        file,
        environ={**HOME, "KVPROXY_QUEUE__MAX_WAITING": "2", "KVPROXY_QUEUE__MAX_WAIT_SECONDS": "2"},
        overrides=[from_assignment("queue.max_waiting=3")],
    )
    assert (settings.queue.max_waiting, settings.queue.max_wait_seconds, settings.checkpoint.min_tokens) == (
        3,
        2,
        1,
    )


def test_an_upstream_can_come_from_the_environment_alone() -> None:
    environ = {
        **HOME,
        "KVPROXY_UPSTREAMS__0__URL": "http://[::1]:9/",
        "KVPROXY_UPSTREAMS__0__API_KEY": "0123",
    }
    (upstream,) = load(environ=environ).upstreams
    assert (upstream.url, upstream.api_key, upstream.name) == ("http://[::1]:9", "0123", "main")


def test_a_section_without_content_counts_as_absent() -> None:
    assert resolve({"queue": None, "state_dir": None}, environ=HOME) == load(environ=HOME)


def test_the_document_that_was_passed_stays_as_it_is() -> None:
    document = {"queue": {"max_waiting": 1}}
    resolve(document, environ={**HOME, "KVPROXY_QUEUE__MAX_WAITING": "2"})
    assert document == {"queue": {"max_waiting": 1}}


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        (HOME, "/home/someone/.local/state/kvproxy"),
        ({**HOME, "XDG_STATE_HOME": "/var/state"}, "/var/state/kvproxy"),
        ({**HOME, "XDG_STATE_HOME": "relative"}, "/home/someone/.local/state/kvproxy"),
    ],
)
def test_state_lies_where_the_xdg_rules_say(environ: dict[str, str], folder: str) -> None:
    assert default_state_dir(environ) == Path(folder)


def test_without_a_home_directory_the_state_directory_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(SettingsError, match="state_dir: null: there is no home"):
        load(environ={})
    assert load(environ={"KVPROXY_STATE_DIR": "/s"}).state_dir == Path("/s")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a: [", "line 1"),
        ("queue: {}\nqueue: {}", "line 2: queue is written twice"),
        ("server: {listen: 'h:1', listen: 'h:2'}", "listen is written twice"),
        ("- a", "should hold sections"),
        ("\x00", "--config"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused_on_one_line(
    tmp_path: Path, content: str, reason: str
) -> None:
    file = tmp_path / "kvproxy.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError, match=reason) as caught:
        read(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_absent_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for name, reason in (("absent", "No such file"), ("binary", "UTF-8"), (".", "directory")):
        with pytest.raises(SettingsError, match=reason):
            read(tmp_path / name)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "kvproxy.yaml"
    file.write_text("# nothing\n")
    assert load(file, environ=HOME) == load(environ=HOME)


def test_what_is_not_built_refuses_the_start() -> None:
    with pytest.raises(SettingsError, match=r"^admin.listen: .* not built"):
        resolve({"admin": {"listen": "127.0.0.1:9000"}}, environ=HOME)


def test_an_unknown_variable_refuses_the_start() -> None:
    with pytest.raises(
        SettingsError, match=r"server_listen: h:1: unknown setting; did you mean server.listen"
    ):
        load(environ={**HOME, "KVPROXY_SERVER_LISTEN": "h:1"})


def test_an_override_below_a_plain_value_is_told_by_its_source() -> None:
    with pytest.raises(SettingsError, match=r"^--set state_dir.x: y: lies below a plain value"):
        resolve({"state_dir": "/s"}, environ=HOME, overrides=[from_assignment("state_dir.x=y")])


def test_wordings_of_side_calls_that_cannot_be_used_refuse_the_start(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("- {client: mine, where: system}\n")
    with pytest.raises(SettingsError, match=r"auxiliary\.fingerprints: .*entry 1: should have starts"):
        resolve({"auxiliary": {"fingerprints": str(file)}}, environ=HOME)
    file.write_text("- {client: mine, where: system, starts: You name things}\n")
    assert resolve({"auxiliary": {"fingerprints": str(file)}}, environ=HOME).auxiliary.fingerprints == file


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("KVPROXY_UPSTREAMS__0__API_KEY", "secret\n", "upstreams.0.api_key: ***: should not begin or end"),
        ("KVPROXY_ADMIN__TOKEN", "secret\n", "admin.token: ***: should not begin or end"),
        (
            "KVPROXY_STATE_DIR",
            "~nobody-of-this-name/x",
            "state_dir: ~nobody-of-this-name/x: begins with a home",
        ),
    ],
)
def test_what_could_never_work_refuses_the_start(name: str, text: str, told: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(told)):
        load(environ={"HOME": "/home/me", name: text})
