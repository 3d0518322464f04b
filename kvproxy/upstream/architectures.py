"""Which memory llama-server gives a model, by its architecture and the keys of its metadata.

As of llama.cpp b11434. An architecture that is on no list is never called full attention: new ones come with
windows and states more often than not.
"""

from __future__ import annotations

from collections.abc import Collection

from kvproxy.snapshots.memory_kind import MemoryKind

RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})

HYBRID = frozenset(
    """
    bailingmoe3 falcon-h1 glm5-next granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe minimax-01
    nemotron_h nemotron_h_moe plamo2 qwen35 qwen35moe qwen3next qwen4exp
    """.split()
)

WINDOWED = frozenset(
    """
    afmoe cohere2 cohere2moe exaone-moe exaone4 gemma2 gemma3 gemma3n gemma4 gpt-oss granite_swa
    laguna llama4 maple mellum mimo2 muse-glimmer olmo2 plamo3 smallthinker spark2_5 step35
    """.split()
)
"""The window has effect. The same key is ignored elsewhere, as in phi3 and in llama."""

WINDOWED_WITHOUT_KEY = frozenset({"gemma2", "llama4"})
"""The server fills in the window that the model file leaves out."""

FULL_WITHOUT_KEY = frozenset({"afmoe", "gemma3", "mellum", "olmo2", "plamo3", "smallthinker"})

CHUNKED = frozenset({"llama4"})
"""Their window starts anew at every multiple of its size; those of all the others here slide, and none looks
ahead."""

WINDOW_WITHOUT_KEY = {"gemma2": 4096}
"""In tokens."""

FULL = frozenset(
    """
    apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell
    command-r dbrx deci deepseek deepseek2 deepseek2-ocr dots1 ernie4_5 ernie4_5-moe exaone falcon
    gemma glm4 glm4moe gpt2 gptj gptneox granite granitemoe grok grovemoe hunyuan-dense hunyuan-moe
    hunyuan_vl hy_v3 internlm2 jais jais2 llama maincoder minicpm minicpm3 minimax-m2 mistral3
    mistral4 mpt nanbeige nemotron olmo olmoe openelm orion paddleocr pangu-embedded phi2 phi3
    phimoe plamo plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe refact seed_oss
    smollm3 stablelm starcoder starcoder2 xverse
    """.split()
)


def kind_of(
    architecture: str, *, has_state: bool, window: int | None, kv_heads: Collection[int]
) -> MemoryKind:
    """`has_state`: there are keys of a recurrent state. `window` in tokens. `kv_heads` per layer, or one."""
    if architecture in RECURRENT:
        return MemoryKind.RECURRENT
    if architecture in HYBRID:
        return MemoryKind.HYBRID
    if has_state:
        return MemoryKind.HYBRID if any(kv_heads) else MemoryKind.RECURRENT
    if architecture in WINDOWED:
        return _windowed(architecture, window)
    has_layers_without_kv = len(set(kv_heads)) > 1 and 0 in kv_heads
    if architecture in FULL and not has_layers_without_kv:
        return MemoryKind.FULL
    return MemoryKind.UNKNOWN


def sliding_window_of(architecture: str, window: int | None) -> int | None:
    """Tokens of a window that is known to slide over the tokens before; None for any other, or none."""
    if architecture not in WINDOWED or architecture in CHUNKED:
        return None
    return window or (WINDOW_WITHOUT_KEY.get(architecture) if window is None else None)


def _windowed(architecture: str, window: int | None) -> MemoryKind:
    if window or (window is None and architecture in WINDOWED_WITHOUT_KEY):
        return MemoryKind.SLIDING_WINDOW
    return MemoryKind.FULL if architecture in FULL_WITHOUT_KEY else MemoryKind.UNKNOWN
