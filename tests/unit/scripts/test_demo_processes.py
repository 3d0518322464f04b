from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts import console, demo_processes
from scripts.demo_processes import Service
from scripts.ports import free_port

SERVE = "import http.server, sys; http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), {}).serve_forever()"
PYTHON = sys.executable  # before the tests' machine puts another one in its place


def service(tmp_path: Path, program: str) -> Service:
    port = free_port()
    command = [PYTHON, "-c", program, str(port)]
    return Service("it", command, port=port, path="/", log=tmp_path / "log")


def listener(tmp_path: Path) -> Service:
    return service(tmp_path, SERVE.format("http.server.SimpleHTTPRequestHandler"))


def test_a_service_is_killed_and_comes_back_on_its_port(tmp_path: Path) -> None:
    with ExitStack() as stack:
        it = listener(tmp_path)
        demo_processes.started([it], stack)
        it.kill()
        it.start()
        it.kill()


def test_a_service_that_ends_at_once_is_trouble_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(console.Trouble) as caught:
        service(tmp_path, "raise SystemExit('no room')").start()
    assert str(caught.value) == "it did not start"
    assert "no room" in caught.value.mend


def test_a_stop_that_ends_badly_is_trouble(tmp_path: Path) -> None:
    with ExitStack() as stack:
        it = listener(tmp_path)
        demo_processes.started([it], stack)
        with pytest.raises(console.Trouble, match="it ended with code -15"):
            it.stop()


def test_settings_of_the_kvproxy_at_home_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROXY_RESTORE__ENABLED", "false")
    monkeypatch.setenv("OTHER", "1")
    environment = demo_processes.environment()
    assert "KVPROXY_RESTORE__ENABLED" not in environment
    assert environment["OTHER"] == "1"


def test_one_dirty_slot_is_unsaved_work() -> None:
    def status(*dirty: bool) -> dict[str, object]:
        return {"servers": [{"slots": [{"dirty": one} for one in dirty]}]}

    assert demo_processes.is_dirty(status(False, True))
    assert not demo_processes.is_dirty(status(False, False))
