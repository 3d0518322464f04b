from __future__ import annotations

import threading
from pathlib import Path

import pytest

from scripts import cache, console


def test_the_folder_follows_xdg_and_falls_back_to_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.folder() == tmp_path / "cache" / "kvproxy"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for not_absolute in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", not_absolute)
        assert cache.folder() == tmp_path / "home" / ".cache" / "kvproxy"


def test_a_workshop_is_gone_afterwards_even_when_the_work_failed() -> None:
    def fail() -> None:
        with cache.workshop("thing") as workshop:
            (workshop / "half").mkdir()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in cache.folder().iterdir()] == [".thing.lock"]


def test_a_second_maker_of_the_same_thing_waits_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    is_waiting = threading.Event()
    monkeypatch.setattr(console, "say", lambda _: is_waiting.set())

    def second() -> None:
        with cache.workshop("thing"):
            order.append("second")

    thread = threading.Thread(target=second)
    with cache.workshop("thing") as workshop:
        thread.start()
        assert is_waiting.wait(timeout=10)
        assert workshop.exists()
        order.append("first")
    thread.join(timeout=10)
    assert order == ["first", "second"]


def test_what_is_installed_replaces_what_stood_there() -> None:
    target = cache.folder() / "thing"
    target.mkdir()
    (target / "old").touch()
    with cache.workshop("thing") as workshop:
        (workshop / "made").mkdir()
        (workshop / "made" / "new").touch()
        cache.install(workshop / "made", target)
    assert [path.name for path in target.iterdir()] == ["new"]
