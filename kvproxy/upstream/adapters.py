"""The adapters (LoRA) that a server applies, as one field of a fingerprint."""

from __future__ import annotations

import json
from collections.abc import Iterable

from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Adapter, Unavailable


async def ask_adapters(client: LlamaServer) -> str | Unavailable:
    """As `adapters_field`, of what the server says now: flags do not tell, with --lora-init-without-apply
    it applies them all the same, and their scales can be changed while it runs. Wakes a sleeping server."""
    adapters = await client.adapters()
    return adapters if isinstance(adapters, Unavailable) else adapters_field(adapters)


def adapters_field(adapters: Iterable[Adapter]) -> str:
    """Ids, paths and scales, "" where none is applied: one of scale 0 changes nothing."""
    applied = sorted((a.id, a.path, _text(a.scale)) for a in adapters if a.scale != 0)
    return json.dumps(applied, separators=(",", ":")) if applied else ""


def _text(scale: float) -> str:
    """A single-precision number in the digits it was given in: 0.1, not 0.10000000149011612."""
    return f"{scale:.6g}"
