from __future__ import annotations

import random
import socket

import pytest

from scripts.ports import HIGHEST, LOWEST, TRIES, free_port


def test_a_free_port_is_none_that_the_system_hands_out_by_itself() -> None:
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 1
    assert all(LOWEST <= port <= HIGHEST < 32768 for port in ports)


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        free = free_port()
        drawn = iter((taken, taken, free))
        monkeypatch.setattr(random.SystemRandom, "randint", lambda *_: next(drawn))
        assert free_port() == free


def test_where_none_is_free_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        drawn = iter([taken] * TRIES)
        monkeypatch.setattr(random.SystemRandom, "randint", lambda *_: next(drawn))
        with pytest.raises(OSError, match="is free"):
            free_port()
