from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from kvproxy.cli.settings_arguments import add_settings_arguments, settings_from
from kvproxy.settings.model import Settings


def settings(*argv: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_settings_arguments(parser)
    return settings_from(parser.parse_args(argv))


def test_each_flag_reaches_its_setting() -> None:
    found = settings(
        *("--upstream", "http://gpu:1", "--listen", "[::1]:2", "--state-dir", "/s", "--snapshot-dir", "/k"),
        *("--log-level", "debug", "--log-format", "json"),
    )
    assert (found.upstreams[0].url, str(found.server.listen)) == ("http://gpu:1", "[::1]:2")
    assert (found.state_dir, found.upstreams[0].snapshot_dir) == (Path("/s"), Path("/k"))
    assert (found.logging.level, found.logging.format) == ("debug", "json")


def test_set_reaches_any_setting_and_may_be_repeated() -> None:
    found = settings("--set", "checkpoint.on_turn=true", "--set", "sessions.headers=[x-a]")
    assert found.checkpoint.on_turn
    assert found.sessions.headers == ("x-a",)


def test_of_two_flags_for_one_setting_the_later_wins() -> None:
    assert str(settings("--set", "server.listen=a:1", "--listen", "b:2").server.listen) == "b:2"
    assert str(settings("--listen", "b:2", "--set", "server.listen=a:1").server.listen) == "a:1"


def test_a_flag_beats_the_environment_and_the_environment_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvproxy.yaml"
    file.write_text("server: {listen: 'file:1'}\nqueue: {max_waiting: 1}\n")
    monkeypatch.setenv("KVPROXY_SERVER__LISTEN", "environment:2")
    monkeypatch.setenv("KVPROXY_QUEUE__MAX_WAITING", "2")
    found = settings("-c", str(file), "--listen", "flag:3")
    assert (str(found.server.listen), found.queue.max_waiting) == ("flag:3", 2)
