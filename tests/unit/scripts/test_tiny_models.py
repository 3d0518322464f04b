from __future__ import annotations

import hashlib
import math
from pathlib import Path

import gguf
import numpy as np
import pytest

from scripts import tiny_models
from scripts.tiny_models import Kind


def read(kind: Kind, folder: Path) -> gguf.GGUFReader:
    tiny_models.write(kind, folder / kind)
    return gguf.GGUFReader(folder / kind)


@pytest.mark.parametrize("kind", Kind)
def test_the_same_kind_is_the_same_file_to_the_byte(kind: Kind, tmp_path: Path) -> None:
    for name in ("first", "second"):
        tiny_models.write(kind, tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_the_weights_do_not_depend_on_the_machine_or_on_numpys_version(tmp_path: Path) -> None:
    tensors = {tensor.name: tensor.data for tensor in read(Kind.LLAMA, tmp_path).tensors}
    query = tensors["blk.0.attn_q.weight"] * np.sqrt(tiny_models.WIDTH)
    # The first of them by hand: twelve bytes, their mean sum taken off, over the spread of such sums.
    total = sum(hashlib.shake_256(b"llama/blk.0.attn_q.weight").digest(12))
    assert query[0, 0] == pytest.approx((total - 12 * 127.5) / math.sqrt(65_535), rel=1e-5)
    assert np.std(query) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("kind", Kind)
def test_every_byte_is_a_token_of_its_own(kind: Kind, tmp_path: Path) -> None:
    fields = read(kind, tmp_path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= set(tokens)
    assert all(len(token) == 1 for token in tokens if not token.startswith("<"))
    assert fields[f"{kind}.context_length"].contents() == 262_144


@pytest.mark.parametrize("kind", Kind)
def test_no_block_writes_to_the_dimension_that_keeps_answers_to_letters(kind: Kind, tmp_path: Path) -> None:
    tensors = {tensor.name: tensor.data for tensor in read(kind, tmp_path).tensors}
    outward = ("attn_output.weight", "ffn_down.weight", "ssm_out.weight", "out_proj.weight")
    written = [data[0] for name, data in tensors.items() if name.endswith(outward)]
    assert len(written) >= tiny_models.LAYERS
    assert not np.any(written[0])
    assert not any(np.any(row) for row in written)
    first_letter = tiny_models.FIRST_SPOKEN
    assert np.all(tensors["output.weight"][:first_letter, 0] < 0)
    assert np.all(tensors["output.weight"][first_letter:, 0] > 0)


def test_the_generation_changes_with_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tiny_models.generation()
    (tmp_path / "other.jinja").write_text("{{ messages }}")
    monkeypatch.setattr(tiny_models, "TEMPLATE", tmp_path / "other.jinja")
    assert tiny_models.generation() != before
