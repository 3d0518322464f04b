"""The user's cache: things that are dear to make, made once, and there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts import console


def folder() -> Path:
    """`$XDG_CACHE_HOME/kvproxy`, by default `~/.cache/kvproxy`; made if missing."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification tells us to ignore a relative path.
    path = (home if home.is_absolute() else Path.home() / ".cache") / "kvproxy"
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def workshop(name: str) -> Iterator[Path]:
    """An empty folder to make `name` in, ours alone and on the cache's file system; removed at the end.

    Waits while another process makes the same thing. What a killed one left behind is cleared away.
    """
    with _lock(name):
        for leftover in folder().glob(f".{name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)  # a dying compiler may still be writing there
        path = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=folder()))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def install(made: Path, target: Path) -> None:
    """Put a file or folder made in a workshop in its place, over whatever stood there."""
    if target.is_dir():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    made.rename(target)


@contextmanager
def _lock(name: str) -> Iterator[None]:
    # The kernel lets go of the lock with its process, so a killed run never blocks the next one.
    with (folder() / f".{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.say(f"waiting for another process that is making {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
