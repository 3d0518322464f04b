"""What the server tells about itself: settings of one fake and the JSON of /props, /slots, /v1/models."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.replies import BUILD
from tests.fakes.snapshot import Geometry
from tests.fakes.state import Slot
from tests.fakes.tokens import CHAT_TEMPLATE, N_VOCAB


@dataclass(slots=True)
class Setup:
    """The command line of one fake server."""

    slots: int = 2
    n_ctx: int = 8192
    """tokens per slot"""
    slot_dir: Path | None = None
    model: str = "/models/fake.gguf"
    alias: str = "fake"
    build: str = BUILD
    ftype: str = "all F32"
    weights: str = "first"
    """what the probabilities of tokens depend on, besides the prompt"""
    kv_type: str = "f16"
    """part of what a snapshot must match"""
    adapters: tuple[str, ...] = ()
    """paths of those loaded, each applied whole at first"""
    bytes_per_token: int = 512
    api_key: str | None = None
    volatile: bool = False
    """as with default flags: each launch clears the other idle slots"""
    unified: bool = False
    """one memory of `n_ctx` tokens for all slots, as it is with `volatile` too"""
    cache_ram: bool = False
    draft: bool = False
    """a draft model runs ahead of the slots"""
    multimodal: bool = False
    """as older builds with a projector: slot actions are refused"""
    embeddings: bool = False
    messages_pin: bool = False
    """`/v1/messages` obeys `id_slot`, as no build does yet"""
    endpoint_slots: bool = True
    endpoint_metrics: bool = True
    idle_close: float = 5.0
    max_requests: int = 100
    marker: str = field(default_factory=lambda: f"<__media_{secrets.token_hex(16)}__>")
    """new in every life"""

    @property
    def is_shared(self) -> bool:
        return self.volatile or self.unified

    @property
    def geometry(self) -> Geometry:
        return Geometry(1 if self.is_shared else self.slots, self.kv_type, self.bytes_per_token)


def props_view(setup: Setup, total_slots: int, *, sleeping: bool) -> dict[str, Any]:
    return {
        "default_generation_settings": {"params": {"n_predict": -1}, "n_ctx": setup.n_ctx},
        "total_slots": total_slots,
        "model_alias": setup.alias,
        "model_ftype": setup.ftype,
        "model_path": setup.model,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": setup.marker,
        "endpoint_slots": setup.endpoint_slots,
        "endpoint_props": False,
        "endpoint_metrics": setup.endpoint_metrics,
        "chat_template": CHAT_TEMPLATE,
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "build_info": setup.build,
        "is_sleeping": sleeping,
    }


def models_view(setup: Setup) -> dict[str, Any]:
    meta = {
        "vocab_type": 1,
        "n_vocab": N_VOCAB,
        "n_ctx": setup.n_ctx,
        "n_ctx_train": 262144,
        "n_embd": 64,
        "n_params": 184896,
        "size": 739584,
        "ftype": setup.ftype,
    }
    model = {
        "id": setup.alias,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llamacpp",
        "meta": meta,
    }
    return {"models": [{"name": setup.alias, "model": setup.alias}], "object": "list", "data": [model]}


def slot_view(slot: Slot) -> dict[str, Any]:
    """A slot that never ran anything shows four fields, even after a restore."""
    view: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "speculative": slot.draft,
        "is_processing": slot.is_processing,
    }
    id_task = slot.running if slot.is_processing else slot.last_task
    if id_task is None:
        return view
    return {
        **view,
        "id_task": id_task,
        "n_prompt_tokens": len(slot.tokens),
        "n_prompt_tokens_processed": slot.progress.n_processed,
        "n_prompt_tokens_cache": slot.progress.n_cached,
        "params": {"stream": False},
        "next_token": [
            {
                "has_next_token": slot.has_next_token,
                "has_new_line": False,
                "n_remain": -1,
                "n_decoded": slot.progress.n_decoded,
            }
        ],
    }
