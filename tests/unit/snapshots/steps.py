"""Stopping a write after one of its steps."""

from __future__ import annotations

import errno
import os

from kvproxy.snapshots.atomic import Observe

STEPS = ["opened", "written", "synced", "renamed", "settled"]


class Crash(BaseException):
    """The process ended here: what handles errors does not run."""


def crash_at(step: str) -> Observe:
    def observe(seen: str) -> None:
        if seen == step:
            raise Crash(step)

    return observe


def fail_at(step: str) -> Observe:
    def observe(seen: str) -> None:
        if seen == step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return observe
