"""What is written down of slots that live, so that a kvproxy started again in front of a server that lived on
can take them up; and when that is proven: pure.

A slot's content is known by what ran there last: the server counts its tasks, and shows for each slot the
last one and how many tokens it holds. If both are as they were written down, in the same life of the process,
nothing ran there since. A restore leaves the task as it is, so before one of ours the record is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvproxy.identifiers import Revision, ServerName, SessionKey, SlotId
from kvproxy.slots.slot import Occupancy, SlotView
from kvproxy.slots.state import SlotState
from kvproxy.upstream.replies import Props, SlotInfo

SCHEMA_VERSION: Final = 1

_Count = Annotated[int, Field(ge=0)]


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LivingSlot(_Closed):
    """A session at rest in its slot. `task` and `held_tokens` are what `/slots` showed of it after its last
    request; the rest is its stay, as in `Occupancy`."""

    slot: SlotId
    session: Annotated[SessionKey, Field(pattern=r"^[0-9a-f]{32}$")]
    client_digest: str
    model: str
    task: int
    held_tokens: Annotated[int, Field(gt=0)]
    revision: Annotated[Revision, Field(ge=0)]
    checkpointed_revision: Annotated[Revision, Field(ge=0)]
    tokens: _Count | None
    unsaved_tokens: _Count

    def occupancy(self, now: float) -> Occupancy:
        """The stay as it goes on; `now` is monotonic seconds."""
        is_dirty = self.revision > self.checkpointed_revision
        return Occupancy(
            self.session,
            self.revision,
            self.checkpointed_revision,
            self.tokens,
            self.unsaved_tokens,
            now if is_dirty else None,
        )


class Living(_Closed):
    """All of one server's. `marker` is of the life of the process they live in."""

    schema_version: Literal[1] = SCHEMA_VERSION
    server: ServerName
    marker: str
    slots: tuple[LivingSlot, ...]


def encode(living: Living) -> bytes:
    return living.model_dump_json(indent=1).encode() + b"\n"


def decode(data: bytes) -> Living | None:
    """None for anything that is not one: it is only a help, and was perhaps written by another version."""
    try:
        return Living.model_validate_json(data)
    except ValidationError:
        return None


def living_slot(view: SlotView, client_digest: str, model: str) -> LivingSlot | None:
    """What to write down of a slot; None if nothing could be proven by it."""
    stay, sight = view.occupancy, view.sight
    at_rest = view.state in (SlotState.RESIDENT, SlotState.SAVING)
    if not at_rest or stay is None or sight is None or sight.task is None or not sight.tokens:
        return None
    if stay.stump is not None:  # what is wrong with it would have to be known too
        return None
    return LivingSlot(
        slot=view.id,
        session=stay.session,
        client_digest=client_digest,
        model=model,
        task=sight.task,
        held_tokens=sight.tokens,
        revision=stay.revision,
        checkpointed_revision=stay.checkpointed_revision,
        tokens=stay.tokens,
        unsaved_tokens=stay.unsaved_tokens,
    )


def proven(
    living: Living, server: ServerName, props: Props, infos: Sequence[SlotInfo]
) -> tuple[LivingSlot, ...]:
    """Those that are still what was written down, each session once."""
    if living.server != server or not props.has_marker or living.marker != props.marker or props.is_sleeping:
        return ()
    seen = {info.id: info for info in infos}
    still = {one.session: one for one in living.slots if _is_same(one, seen.get(one.slot))}
    return tuple(still.values())


def _is_same(one: LivingSlot, info: SlotInfo | None) -> bool:
    if info is None or info.is_processing:
        return False
    return (info.id_task, info.n_prompt_tokens) == (one.task, one.held_tokens)


def wants_look(views: Collection[SlotView]) -> bool:
    """Whether a look at `/slots` would tell more: somebody rests whose last task was not seen."""
    return any(view.state is SlotState.RESIDENT and view.sight is None for view in views)


def were_slept_away(views: Collection[SlotView], infos: Sequence[SlotInfo], asked_at: float) -> bool:
    """Whether a slot that an answer had filled before `asked_at` (monotonic seconds) has run nothing: the
    server fell asleep just before this look, which woke it, and all its slots are new."""
    unused = {info.id for info in infos if info.id_task is None and not info.is_processing}
    return any(
        view.id in unused and view.is_free and view.is_dirty and view.last_used < asked_at
        for view in views
        if view.occupancy is not None and view.occupancy.tokens is not None
    )
