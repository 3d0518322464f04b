"""Whether a prompt goes on from what is stored: asked of the server, on tokens.

Memory that cannot roll back goes on from nothing else. A restored sliding window that loses its newest tokens
is *wrong*, not only useless, so there what is not known to extend it is an obstacle; elsewhere it costs a
restore in vain.
"""

from __future__ import annotations

from kvproxy.boundary.continuations import NoBoundary
from kvproxy.boundary.prefix import prompt_ids
from kvproxy.boundary.turn import Asked
from kvproxy.checkpoint.parts import Parts
from kvproxy.identifiers import Epoch, SnapshotName
from kvproxy.snapshots.manifest import Generation, digest_of_ids
from kvproxy.snapshots.memory_kind import MemoryKind

RENDER_SECONDS = 5.0
"""For each of the two questions it takes to know a prompt's tokens."""


async def obstacle_to(parts: Parts, epoch: Epoch, generation: Generation, asked: Asked | None) -> str | None:
    """Why a memory that cannot roll back could not go on from this snapshot, in the life that is `epoch`."""
    await learn_kind(parts, epoch, generation.name)
    kind = parts.standing.facts.kind
    if kind.may_roll_back or kind is MemoryKind.UNKNOWN:
        return None
    extends = await is_extended(parts, generation.tokens, generation.ids_digest, asked)
    if extends or (extends is None and kind is not MemoryKind.SLIDING_WINDOW):
        return None
    known = "does not extend" if extends is False else "is not known to extend"
    return f"the prompt {known} the {generation.tokens} tokens of the snapshot"


async def learn_kind(parts: Parts, epoch: Epoch, name: SnapshotName) -> None:
    """From a file that the server wrote, or would take, where nothing else has told its kind of memory."""
    if parts.standing.facts.kind is MemoryKind.UNKNOWN:
        parts.found_kind(epoch, await parts.files.kind_of(name))


async def is_extended(parts: Parts, stored: int, ids_digest: str | None, asked: Asked | None) -> bool | None:
    """Whether the prompt begins with all `stored` tokens and goes on; None if that is not known."""
    if ids_digest is None or asked is None:
        return None
    ids = await prompt_ids(parts.client, asked.label, asked.document, timeout=RENDER_SECONDS)
    if isinstance(ids, NoBoundary):
        return None
    return len(ids) > stored and digest_of_ids(ids[:stored]) == ids_digest
