from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path

import pytest

from kvproxy.cli import daemon_client, main
from kvproxy.cli.daemon_client import (
    DaemonClient,
    DaemonError,
    add_daemon_arguments,
    client_from,
    session_path,
)
from kvproxy.errors import SettingsError
from tests.unit.cli.conftest import Ask, Daemon


def client(*argv: str) -> DaemonClient:
    parser = argparse.ArgumentParser()
    add_daemon_arguments(parser)
    return client_from(parser.parse_args(argv))


def test_without_a_flag_the_daemon_is_where_it_listens_by_default() -> None:
    assert client() == DaemonClient("http://127.0.0.1:8090", None)


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("127.0.0.1:9", "http://127.0.0.1:9"),
        ("0.0.0.0:9", "http://127.0.0.1:9"),
        ("[::]:9", "http://[::1]:9"),
        ("box:9", "http://box:9"),
    ],
)
def test_it_is_looked_for_where_the_settings_let_it_listen(
    listen: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPROXY_SERVER__LISTEN", listen)
    assert client().url == url
    monkeypatch.delenv("KVPROXY_SERVER__LISTEN")
    file = tmp_path / "kvproxy.yaml"
    file.write_text(f"server: {{listen: '{listen}'}}\nadmin: {{token: in-the-file}}\n")
    assert client("-c", str(file)) == DaemonClient(url, "in-the-file")


def test_flags_beat_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROXY_ADMIN__TOKEN", "from-environment")
    assert client("--url", "http://box:1/") == DaemonClient("http://box:1", "from-environment")
    assert client("--token", "flag").token == "flag"


def test_a_token_that_cannot_be_sent_is_wrong_usage_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--token", "sec\nret"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("kvproxy status: --token: ***: should hold no line break")
    assert "ret" not in told.replace("secret", "")


def test_a_token_goes_out_in_the_bytes_in_which_the_daemon_knows_it(daemon: Daemon) -> None:
    daemon.gives("GET", "/kvproxy/slots", {})
    DaemonClient(daemon.url, "geheim-\u00e4-\u65e5").get("/kvproxy/slots")
    (_, _, sent) = daemon.asked[-1]
    assert sent is not None
    assert sent.encode("latin-1") == "Bearer geheim-\u00e4-\u65e5".encode()


def test_an_id_of_any_bytes_can_be_named() -> None:
    assert session_path(b"a\xff/b".decode("utf-8", "surrogateescape")) == "/kvproxy/sessions/a%FF%2Fb"


def test_an_address_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="--url: nonsense"):
        client("--url", "nonsense")
    assert main(["status", "--url", "nonsense"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_token_is_sent_and_no_header_without_one(daemon: Daemon) -> None:
    daemon.gives("GET", "/x", {})
    DaemonClient(daemon.url, "secret").get("/x")
    DaemonClient(daemon.url).get("/x")
    assert [authorization for *_, authorization in daemon.asked] == ["Bearer secret", None]


def test_without_a_daemon_the_line_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["status", "--url", f"http://127.0.0.1:{port}"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "kvproxy serve" in shown.err
    assert f":{port}" in shown.err


def test_a_daemon_that_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_client, "LOOK_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DaemonError, match=r"no answer within 0\.01 s"):
            DaemonClient(url).get("/x")


def test_who_lacks_the_token_is_told_the_flag(daemon: Daemon, ask: Ask) -> None:
    daemon.refuses("GET", "/kvproxy/status", 401, "KV_UNAUTHORIZED", "the reason")
    shown = ask("status")
    assert (shown.code, shown.out) == (1, "")
    assert shown.err == "kvproxy status: the reason; set KVPROXY_ADMIN__TOKEN or give --token\n"


ASKING = ("status", "slots", "sessions", "snapshots", "save s", "invalidate s", "purge s", "flush", "gc")


@pytest.mark.parametrize("command", ASKING)
def test_with_json_what_the_daemon_refuses_is_an_object_on_stdout_too(
    daemon: Daemon, ask: Ask, command: str
) -> None:
    paths = {"save s": "sessions/s/save", "invalidate s": "sessions/s/invalidate", "purge s": "sessions/s"}
    for method in ("GET", "POST", "DELETE"):
        daemon.refuses(method, f"/kvproxy/{paths.get(command, command)}", 502, "KV_SAVE_FAILED", "it is full")
    shown = ask(*command.split(), "--json")
    assert shown.code == 1
    assert shown.json == {"error": {"code": "KV_SAVE_FAILED", "message": "it is full"}}
    assert shown.err == f"kvproxy {command.split()[0]}: it is full\n"


@pytest.mark.parametrize("command", ASKING)
def test_with_json_a_daemon_that_is_not_there_is_an_object_on_stdout_too(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main([*command.split(), "--json", "--url", f"http://127.0.0.1:{port}"]) == 1
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert error["code"] == "KV_DAEMON_UNAVAILABLE"
    assert shown.err == f"kvproxy {command.split()[0]}: {error['message']}\n"


def test_another_error_of_the_daemon_is_told_as_it_is(daemon: Daemon, ask: Ask) -> None:
    daemon.refuses("GET", "/kvproxy/status", 409, "KV_SLOT_BUSY", "try again")
    assert ask("status").err == "kvproxy status: try again\n"


@pytest.mark.parametrize(("status", "body"), [(404, "File Not Found"), (200, "<html>"), (200, [])])
def test_what_is_not_kvproxy_is_recognised(daemon: Daemon, ask: Ask, status: int, body: object) -> None:
    daemon.gives("GET", "/kvproxy/status", body, status)
    shown = ask("status")
    assert shown.code == 1
    assert "is not kvproxy" in shown.err
    assert ask("status", "--json").json["error"]["code"] == "KV_DAEMON_UNAVAILABLE"


def test_a_session_id_cannot_leave_its_place_in_the_path() -> None:
    assert session_path("a/../b?c", "save") == "/kvproxy/sessions/a%2F..%2Fb%3Fc/save"
    assert session_path("plain") == "/kvproxy/sessions/plain"
