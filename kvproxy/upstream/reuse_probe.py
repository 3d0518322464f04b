"""Whether anything that is restored is reused at all: a few tokens saved, erased, restored and gone on from.

A sliding window without `--swa-full` reuses nothing after a restore, whatever the server answers, and neither
the server nor its files tell which of the two it runs with.
"""

from __future__ import annotations

from enum import StrEnum

from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Erased, Restored, Saved, Unavailable

TEXT = "Whatever is put away here is to be found again, word for word, and gone on from."
PROBE_SECONDS = 10.0
"""For each of the calls."""

REUSED_SHARE = 0.5


class Reuse(StrEnum):
    WORKS = "works"
    NOTHING = "nothing"
    UNKNOWN = "unknown"
    """One of the calls was not answered, or not as it should be."""


async def probe_reuse(client: LlamaServer, slot: SlotId, name: SnapshotName) -> Reuse:
    """`slot` must hold nothing of value, and be ours until this returns; it is left empty, unless a
    call was not answered: then it may still be computing.

    Leaves a file `name` of a few dozen bytes (an empty snapshot) for the caller to delete.
    """
    ids = await client.tokenize(TEXT)
    if isinstance(ids, Unavailable) or len(ids) < 2:
        return Reuse.UNKNOWN
    put = await client.complete(slot, ids[:-1], n_predict=0, timeout=PROBE_SECONDS)
    if isinstance(put, Unavailable) or not await _there_and_back(client, slot, name):
        return Reuse.UNKNOWN
    again = await client.complete(slot, ids, n_predict=0, timeout=PROBE_SECONDS)
    if isinstance(again, Unavailable):
        return Reuse.UNKNOWN  # it may still be computing: no action may meet it
    # An empty slot saved under the name is all that is left of it, also where we cannot delete files.
    await client.start_erase(slot).wait(PROBE_SECONDS)
    await client.start_save(slot, name).wait(PROBE_SECONDS)
    return Reuse.WORKS if again.reused >= REUSED_SHARE * len(ids) else Reuse.NOTHING


async def _there_and_back(client: LlamaServer, slot: SlotId, name: SnapshotName) -> bool:
    saved = await client.start_save(slot, name).wait(PROBE_SECONDS)
    if not isinstance(saved, Saved) or saved.tokens < 1:
        return False
    erased = await client.start_erase(slot).wait(PROBE_SECONDS)
    restored = await client.start_restore(slot, name).wait(PROBE_SECONDS)
    return isinstance(erased, Erased) and isinstance(restored, Restored) and restored.tokens == saved.tokens
