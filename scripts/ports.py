"""A free port, and waiting for what listens on it."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request


def free_port() -> int:
    """Free at this moment, on the loopback interface."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until_answers(url: str, seconds: float = 60.0) -> None:
    """Return once `url` answers 200. Raises TimeoutError."""
    until = time.monotonic() + seconds  # noqa: TID251 - a script has no clock to be given
    while time.monotonic() < until:  # noqa: TID251
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{url} did not answer within {seconds:g} s")
