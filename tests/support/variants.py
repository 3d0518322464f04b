"""Models that are nearly another one: the same shape, and answers of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np

RANK = 2


def halved_precision(model: Path, path: Path) -> Path:
    """The weights of the blocks rounded to half precision, as the gentlest quantisation does."""
    shutil.copyfile(model, path)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.startswith("blk."):
            tensor.data[:] = tensor.data.astype(np.float16)
    return path


def fine_tuned(model: Path, path: Path) -> Path:
    """One matrix of one block a hundredth larger."""
    shutil.copyfile(model, path)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == "blk.0.attn_v.weight":
            tensor.data[:] *= np.float32(1.01)
    return path


def adapter(model: Path, path: Path) -> Path:
    """A small LoRA for the keys of each block."""
    random = np.random.default_rng(1)
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for tensor in reader.tensors:
        if tensor.name.endswith("attn_k.weight"):
            fan_in, fan_out = (int(size) for size in tensor.shape)
            down = 0.001 * random.standard_normal((RANK, fan_in))
            writer.add_tensor(f"{tensor.name}.lora_a", down.astype(np.float32))
            up = random.standard_normal((fan_out, RANK))
            writer.add_tensor(f"{tensor.name}.lora_b", up.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
