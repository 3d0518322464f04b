"""A free port, and waiting for what listens on it."""

from __future__ import annotations

import random
import socket
import time
import urllib.error
import urllib.request

LOWEST, HIGHEST = 10240, 32767
"""Below those that the system hands out (from 32768 on Linux). One of its own may be the near end of a
connection by the time it is listened on, also again after a restart; and who asks again and again whether
anybody listens there can at last be connected to himself."""
TRIES = 100


def free_port() -> int:
    """Free at this moment, on the loopback interface."""
    for _ in range(TRIES):
        port = random.SystemRandom().randint(LOWEST, HIGHEST)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {LOWEST} to {HIGHEST} is free")


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
