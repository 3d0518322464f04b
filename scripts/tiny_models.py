"""Write tiny GGUF models with random weights, one for each kind of memory llama-server has.

One byte of text is one token, so a test can count tokens by counting bytes. The answers are random letters
and spaces to the length asked for: only so does an answer, sent back as history, become the very tokens
that were generated. The weights are fixed: hashed from their names, the same on every machine.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

TEMPLATE = Path(__file__).with_suffix(".jinja")
CONTEXT_LENGTH = 262_144
SLIDING_WINDOW = 64

WIDTH = 64
LAYERS = 4
HEADS = 2
KV_HEADS = 1
HEAD_WIDTH = WIDTH // HEADS  # 32, the block of the quantised KV types: with less they cannot be tried
FEED_FORWARD = 128

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
SPOKEN_TOKENS = (*"abcdefghijklmnopqrstuvwxyz", "\u2581")  # the last one is how this tokenizer writes a space
FIRST_SPOKEN = len(SPECIAL_TOKENS) + 256
VOCABULARY = FIRST_SPOKEN + len(SPOKEN_TOKENS)

# Dimension 0 of the residual stream is the same for every token and no block writes to it. The output layer
# reads it as a bias: for letters and spaces, against every other byte and against the end of the answer.
BIAS_SIZE = 4.0
BIAS_WEIGHT = 3.0


class Kind(StrEnum):
    LLAMA = "llama"  # full attention
    GEMMA3 = "gemma3"  # sliding-window attention in every second layer
    MAMBA = "mamba"  # recurrent
    LFM2 = "lfm2"  # hybrid: recurrent convolutions and full attention by turns


def generation() -> str:
    """Eight characters that change with the generator, so that a changed one makes new files."""
    return hashlib.sha256(Path(__file__).read_bytes() + TEMPLATE.read_bytes()).hexdigest()[:8]


def write(kind: Kind, path: Path) -> None:
    model = _Model(kind, path)
    model.vocabulary()
    model.ends("token_embd_norm" if kind is Kind.LFM2 else "output_norm")
    {Kind.LLAMA: _llama, Kind.GEMMA3: _gemma3, Kind.MAMBA: _mamba, Kind.LFM2: _lfm2}[kind](model)
    model.save()


def _llama(model: _Model) -> None:
    model.attention_sizes(KV_HEADS)
    model.writer.add_rope_dimension_count(HEAD_WIDTH)
    for layer in range(LAYERS):
        model.attention(layer)
        model.feed_forward(layer)


def _gemma3(model: _Model) -> None:
    model.attention_sizes(KV_HEADS)
    model.writer.add_sliding_window(SLIDING_WINDOW)
    model.writer.add_sliding_window_pattern(2)
    for layer in range(LAYERS):
        model.attention(layer)
        model.head_norms(layer)
        model.feed_forward(layer)
        model.ones(f"blk.{layer}.post_attention_norm.weight", WIDTH)
        model.ones(f"blk.{layer}.post_ffw_norm.weight", WIDTH)


def _lfm2(model: _Model) -> None:
    kv_heads = [0, KV_HEADS] * (LAYERS // 2)  # llama.cpp takes a layer without them for a recurrent one
    model.attention_sizes(kv_heads)
    model.writer.add_shortconv_l_cache(3)
    for layer, heads in enumerate(kv_heads):
        if heads:
            model.attention(layer)
            model.head_norms(layer)
        else:
            model.short_convolution(layer)
        model.feed_forward(layer)


def _mamba(model: _Model) -> None:
    inner, state, kernel, rank = 2 * WIDTH, 16, 4, 4  # llama.cpp knows no other expansion than 2
    writer = model.writer
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    decay = -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        model.ones(f"{block}.attn_norm.weight", WIDTH)
        model.random(f"{block}.ssm_in.weight", 2 * inner, WIDTH)
        model.random(f"{block}.ssm_conv1d.weight", inner, kernel)
        model.zeros(f"{block}.ssm_conv1d.bias", inner)
        model.random(f"{block}.ssm_x.weight", rank + 2 * state, inner)
        model.random(f"{block}.ssm_dt.weight", inner, rank)
        model.zeros(f"{block}.ssm_dt.bias", inner)
        writer.add_tensor(f"{block}.ssm_a", decay)
        model.ones(f"{block}.ssm_d", inner)
        model.residual(f"{block}.ssm_out.weight", inner)


class _Model:
    """A GGUF file in the making: the parts that several architectures share."""

    def __init__(self, kind: Kind, path: Path) -> None:
        self._kind = kind
        self.writer = gguf.GGUFWriter(path, kind.value)
        self.writer.add_name(f"tiny-{kind}")
        self.writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        self.writer.add_context_length(CONTEXT_LENGTH)
        self.writer.add_embedding_length(WIDTH)
        self.writer.add_block_count(LAYERS)
        self.writer.add_layer_norm_rms_eps(1e-5)

    def vocabulary(self) -> None:
        kinds = gguf.TokenType
        types = [kinds.UNKNOWN] + [kinds.CONTROL] * (len(SPECIAL_TOKENS) - 1)
        types += [kinds.BYTE] * 256 + [kinds.NORMAL] * len(SPOKEN_TOKENS)
        writer = self.writer
        writer.add_vocab_size(VOCABULARY)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *SPOKEN_TOKENS])
        writer.add_token_scores([0.0] * VOCABULARY)
        writer.add_token_types(types)
        writer.add_unk_token_id(SPECIAL_TOKENS.index("<unk>"))
        writer.add_bos_token_id(SPECIAL_TOKENS.index("<s>"))
        writer.add_eos_token_id(SPECIAL_TOKENS.index("<|im_end|>"))
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(False)
        writer.add_add_space_prefix(False)  # it would add a token that is no byte of the text
        writer.add_chat_template(TEMPLATE.read_text())

    def ends(self, norm: str) -> None:
        """What comes before the first block and after the last one."""
        embedding = self._normal("token_embd.weight", VOCABULARY, WIDTH)
        embedding[:, 0] = BIAS_SIZE
        output = 0.3 * self._normal("output.weight", VOCABULARY, WIDTH)
        output[:FIRST_SPOKEN, 0] = -BIAS_WEIGHT
        output[FIRST_SPOKEN:, 0] = BIAS_WEIGHT
        self.writer.add_tensor("token_embd.weight", embedding)
        self.writer.add_tensor("output.weight", output)
        self.ones(f"{norm}.weight", WIDTH)

    def attention_sizes(self, kv_heads: int | list[int]) -> None:
        self.writer.add_feed_forward_length(FEED_FORWARD)
        self.writer.add_head_count(HEADS)
        self.writer.add_head_count_kv(kv_heads)
        self.writer.add_key_length(HEAD_WIDTH)
        self.writer.add_value_length(HEAD_WIDTH)
        self.writer.add_rope_freq_base(10_000.0)

    def attention(self, layer: int) -> None:
        block = f"blk.{layer}"
        self.ones(f"{block}.attn_norm.weight", WIDTH)
        self.random(f"{block}.attn_q.weight", HEADS * HEAD_WIDTH, WIDTH)
        self.random(f"{block}.attn_k.weight", KV_HEADS * HEAD_WIDTH, WIDTH)
        self.random(f"{block}.attn_v.weight", KV_HEADS * HEAD_WIDTH, WIDTH)
        self.residual(f"{block}.attn_output.weight", HEADS * HEAD_WIDTH)

    def head_norms(self, layer: int) -> None:
        self.ones(f"blk.{layer}.attn_q_norm.weight", HEAD_WIDTH)
        self.ones(f"blk.{layer}.attn_k_norm.weight", HEAD_WIDTH)

    def short_convolution(self, layer: int) -> None:
        block = f"blk.{layer}"
        self.ones(f"{block}.attn_norm.weight", WIDTH)
        self.random(f"{block}.shortconv.conv.weight", WIDTH, 3)
        self.random(f"{block}.shortconv.in_proj.weight", 3 * WIDTH, WIDTH)
        self.residual(f"{block}.shortconv.out_proj.weight", WIDTH)

    def feed_forward(self, layer: int) -> None:
        block = f"blk.{layer}"
        self.ones(f"{block}.ffn_norm.weight", WIDTH)
        self.random(f"{block}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        self.random(f"{block}.ffn_up.weight", FEED_FORWARD, WIDTH)
        self.residual(f"{block}.ffn_down.weight", FEED_FORWARD)

    def residual(self, name: str, fan_in: int) -> None:
        """A projection back into the residual stream, which leaves the bias dimension alone."""
        weights = self._normal(name, WIDTH, fan_in) / np.float32(np.sqrt(fan_in))
        weights[0] = 0.0
        self.writer.add_tensor(name, weights)

    def random(self, name: str, fan_out: int, fan_in: int) -> None:
        self.writer.add_tensor(name, self._normal(name, fan_out, fan_in) / np.float32(np.sqrt(fan_in)))

    def ones(self, name: str, size: int) -> None:
        self.writer.add_tensor(name, np.ones(size, np.float32))

    def zeros(self, name: str, size: int) -> None:
        self.writer.add_tensor(name, np.zeros(size, np.float32))

    def save(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _normal(self, name: str, rows: int, columns: int) -> NDArray[np.float32]:
        """Numbers of mean 0 and variance 1, nearly normal: sums of twelve uniform ones.

        Hashed, not drawn from numpy's generators, whose streams may change with its version.
        """
        hashed = hashlib.shake_256(f"{self._kind}/{name}".encode()).digest(12 * rows * columns)
        uniform = np.frombuffer(hashed, np.uint8).reshape(rows, columns, 12)
        centred = uniform.sum(axis=2, dtype=np.float32) - np.float32(12 * 255 / 2)
        scaled: NDArray[np.float32] = centred / np.float32(np.sqrt(65_535))
        return scaled
