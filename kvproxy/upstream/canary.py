"""Asks a server for its canary.

The prompt repeats itself, so that what follows depends on distances between tokens: a rope scale of 2 moves
SmolLM2's answer by 3.9, against 1 for plain prose of the same length. 13 tokens do (45 where every byte is
one). More cost more and must stay below 64: from there on flash attention on a CPU computes in tiles, and
the same server with another batch size no longer answers the same.

Not seen by it: f32 in place of f16 for the KV, which flash attention rounds to f16 while it computes a
prompt; the server itself refuses such snapshots. A model without rotary encoding or KV has none of these
differences either.
"""

from __future__ import annotations

from kvproxy.identifiers import SlotId
from kvproxy.snapshots.canary import Canary
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Unavailable

PROMPT = "red cat, blue dog, green bird, red cat, blue"
TOP = 8
ASK_SECONDS = 60.0
"""The prompt takes a fraction of a second, or a few on a slow CPU; a batch of others may go first."""


async def ask_canary(client: LlamaServer, slot: SlotId, timeout: float = ASK_SECONDS) -> Canary | Unavailable:
    """Computed in `slot`, which must be leased and empty, and holds the prompt afterwards.

    Ask while the other slots are idle. Beside busy ones with unified KV a difference of 2e-3 was seen on
    tiny models and 0.2 on SmolLM2, where nothing had changed: a mismatch found then is to be asked again.
    Wakes a sleeping server; where idle slots are cleared, it clears them. After a timeout the slot may
    still be computing.
    """
    logprobs = await client.likely_next(slot, PROMPT, top=TOP, timeout=timeout)
    return logprobs if isinstance(logprobs, Unavailable) else Canary.of(logprobs)
