"""What is tried out as a life of the server begins, before anybody is served, where all slots are idle and
empty: whether a request in one slot empties another, and whether all slots share one memory.

The server tells neither. The first shows itself in `/slots`, the second in a slot file of a few tokens, if we
see the server's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import Saved, SlotInfo, Unavailable

PROBES = ((1, 2, 3, 4), (2, 3, 4, 5))
"""What the first slot is given, and then the second: token ids that every vocabulary has."""

PROBE_SECONDS = 30.0
"""Two prompts of four tokens, on a machine that may still be reading the model."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen; None for what was not. `clears`: a request in one slot empties another; `shares`: all
    slots have one memory; `pins_messages`: `/v1/messages` runs in the slot that it names."""

    clears: bool | None = None
    shares: bool | None = None
    pins_messages: bool | None = None


class TrialFiles(Protocol):
    """A file for a moment in the server's save directory, if we see that."""

    @property
    def is_visible(self) -> bool: ...

    def new_name(self) -> SnapshotName: ...

    async def delete(self, name: SnapshotName) -> object: ...

    async def streams_of(self, name: SnapshotName) -> int | None: ...


NOTHING_SEEN = Trial()


async def try_out(client: LlamaServer, slots: Sequence[SlotInfo], files: TrialFiles) -> Trial:
    """Tried out only where there are two slots and all are idle and empty, as they are again afterwards.

    Nobody else may be about to use them.
    """
    if len(slots) < 2 or any(info.is_processing or info.n_prompt_tokens for info in slots):
        return NOTHING_SEEN
    first, second = slots[0].id, slots[1].id
    put = await client.complete(first, PROBES[0], n_predict=0, timeout=PROBE_SECONDS)
    if isinstance(put, Unavailable):
        return NOTHING_SEEN
    shares = await _shares_memory(client, first, files)
    put = await client.complete(second, PROBES[1], n_predict=0, timeout=PROBE_SECONDS)
    infos = put if isinstance(put, Unavailable) else await client.slots()
    # One that did not answer may still be computing, and no action may meet it.
    for slot in (first,) if isinstance(put, Unavailable) else (first, second):
        await client.start_erase(slot).wait(PROBE_SECONDS)
    clears = None if isinstance(infos, Unavailable) else _is_cleared(infos, first)
    return Trial(clears, shares)


async def _shares_memory(client: LlamaServer, slot: SlotId, files: TrialFiles) -> bool | None:
    if not files.is_visible:
        return None
    name = files.new_name()
    saved = await client.start_save(slot, name).wait(PROBE_SECONDS)
    streams = await files.streams_of(name) if isinstance(saved, Saved) else None
    await files.delete(name)
    return None if streams is None else streams == 1


def _is_cleared(infos: Sequence[SlotInfo], slot: SlotId) -> bool | None:
    held = next((info.n_prompt_tokens for info in infos if info.id == slot), None)
    return None if held is None else held == 0
