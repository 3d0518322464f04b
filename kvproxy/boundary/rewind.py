"""Bring an idle slot back to a boundary, so that a save there is of use to every next request.

Full attention drops the tokens after the boundary. Recurrent, hybrid and sliding-window memory cannot:
llama-server goes back to a context checkpoint and computes from there to the boundary. While it computes a
prompt it makes one 4 tokens before the end, one a physical batch (512) earlier, and one where the last
question begins, whatever `--checkpoint-min-step` says and however short the prompt. So 1 to 4 tokens are
computed as a rule; up to a physical batch where the template begins the reply with more than 3 tokens that
it does not keep; all from the first difference on, if the next prompt shows the history in another way.

With `--ctx-checkpoints 0` there is none, and there is none after a restore until a request has run: then the
whole boundary is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.boundary.prefix import Boundary
from kvproxy.identifiers import SlotId
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Unavailable


@dataclass(frozen=True, slots=True)
class Rewound:
    """The slot holds exactly the boundary: `computed` and `reused` tokens of it."""

    computed: int
    reused: int


@dataclass(frozen=True, slots=True)
class NotRewound:
    """What the slot holds is not known, and it may still be computing: see that it is idle."""

    detail: str


async def rewind(
    client: LlamaServer, slot: SlotId, boundary: Boundary, *, timeout: float
) -> Rewound | NotRewound:
    """`slot` must be idle, and ours until this returns. What it held beyond the boundary is lost.

    A cancel closes the connection, and with it the server stops; when, only `/slots` tells.
    """
    answer = await client.complete(slot, boundary.ids, n_predict=0, timeout=timeout)
    if isinstance(answer, Unavailable):
        return NotRewound(answer.message)
    if answer.computed + answer.reused != len(boundary.ids):
        return NotRewound(f"{answer.computed + answer.reused} tokens where {len(boundary.ids)} were sent")
    return Rewound(answer.computed, answer.reused)
