"""Find a llama-server, or build the one kvproxy is tested with: the path is the last line of stdout."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # run as a file, it would not find its package

from scripts import console, llama_server_build

VARIABLE = "KVPROXY_TEST_LLAMA_SERVER"


def find_or_build(path: Path | None = None) -> Path:
    """An executable llama-server: the one asked for, else on PATH, else in the cache, else built into it.

    `path`, or the environment variable `KVPROXY_TEST_LLAMA_SERVER`, asks for one and is never passed over.
    Raises `console.Trouble` when that one does not run, or when nothing is there and the build fails.
    """
    return find(path) or llama_server_build.build()


def find(path: Path | None = None) -> Path | None:
    """As `find_or_build`, but None where it would build."""
    if asked_for := path or _from_environment():
        return _asked_for(asked_for)
    return _on_path() or _cached()


def _from_environment() -> Path | None:
    value = os.environ.get(VARIABLE)
    return Path(value) if value else None


def _asked_for(path: Path) -> Path:
    path = path.absolute()
    version = llama_server_build.version_of(path)
    if version is None:
        raise console.Trouble(
            f"{path} does not run as a llama-server",
            f"give the path of one that answers --version (--path or {VARIABLE}), or none to have it built",
        )
    return _announced(path, version)


def _on_path() -> Path | None:
    found = shutil.which("llama-server")
    if found is None:
        return None
    path = Path(found).absolute()
    version = llama_server_build.version_of(path)
    if version is None:
        console.say(f"passing over {path}: it does not answer --version")
        return None
    return _announced(path, version)


def _cached() -> Path | None:
    path = llama_server_build.installed()
    version = llama_server_build.version_of(path)
    return None if version is None else _announced(path, version)


def _announced(path: Path, version: str) -> Path:
    tested = llama_server_build.BUILD
    note = "" if tested.removeprefix("b") in version else f"; kvproxy is tested with {tested}"
    console.say(f"llama-server {version}{note}")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, help=f"use this llama-server (default: ${VARIABLE})")
    print(find_or_build(parser.parse_args().path))


if __name__ == "__main__":
    sys.exit(console.run(main))
