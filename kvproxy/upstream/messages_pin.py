"""Finds out, once in each life of the server, whether `/v1/messages` obeys a slot that the request names.

The builds we know ignore it and choose by themselves. One that does not can be pinned like any other request.
What a build is called says nothing of that; where a request ran does. So where all slots are idle and empty,
a few tokens are sent that name a slot, and then once more that name the other one: a server that chooses
would take the slot of before, which holds the very same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvproxy.identifiers import SlotId
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import SlotInfo, Unavailable

QUESTION = "Which slot?"
TRIAL_SECONDS = 30.0

Tasks = Mapping[SlotId, int | None]


async def honours_messages_pin(client: LlamaServer, slots: Sequence[SlotInfo]) -> bool:
    """Whether it does; False where that is not known. Tried out only where there are two slots and all are
    idle and empty, as they are again afterwards. Nobody else may be about to use them."""
    if len(slots) < 2 or any(info.is_processing or info.n_prompt_tokens for info in slots):
        return False
    first, second = slots[0].id, slots[1].id
    used: set[SlotId] = set()
    obeys = True
    for named in (first, second, first):
        before = await _tasks(client)
        answered = await client.ask_message(named, QUESTION, TRIAL_SECONDS)
        ran = _ran(before, await _tasks(client))
        if not answered:
            return False  # it may still be computing: no action may meet it
        used |= ran
        obeys = ran == {named}
        if not obeys:
            break
    for slot in used:
        await client.start_erase(slot).wait(TRIAL_SECONDS)
    return obeys


async def _tasks(client: LlamaServer) -> Tasks:
    infos = await client.slots()
    return {} if isinstance(infos, Unavailable) else {info.id: info.id_task for info in infos}


def _ran(before: Tasks, after: Tasks) -> set[SlotId]:
    return {slot for slot, task in after.items() if slot in before and task != before[slot]}
