"""A slot as everyone but the table sees it: frozen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvproxy.frozen import frozen
from kvproxy.identifiers import Revision, SessionKey, SlotId
from kvproxy.slots.state import AT_REST, SlotState


@frozen
class Stump:
    """Of these first `tokens` of a slot only the end of the sliding window is there, as a restore left it.

    The server goes on from any of them, and computes what follows wrongly if that is before their end.
    """

    tokens: int
    ids_digest: str | None
    """Of their ids (see `manifest.digest_of_ids`); None if it is not known."""


@frozen
class Occupancy:
    """A session's stay in a slot, from its restore or first request to its eviction.

    `tokens` is what the slot holds, None after a request that was broken off; `unsaved_tokens` what was
    computed since the last checkpoint; `dirty_since` monotonic seconds.
    """

    session: SessionKey
    revision: Revision
    checkpointed_revision: Revision
    tokens: int | None = 0
    unsaved_tokens: int = 0
    dirty_since: float | None = None
    is_boundary: bool = False
    """The slot was brought back to where the last reply began."""
    stump: Stump | None = None
    saving: Revision | None = field(default=None, compare=False)
    """The revision of which a checkpoint was begun last; None before any."""
    later_tokens: int = field(default=0, compare=False)
    """Computed since then."""
    later_since: float | None = field(default=None, compare=False)
    """When the first of these came, in monotonic seconds."""

    @property
    def is_dirty(self) -> bool:
        return self.revision > self.checkpointed_revision

    def changed(self, now: float, tokens: int | None, computed: int) -> Occupancy:
        """After a request that may have changed the KV."""
        return Occupancy(
            self.session,
            Revision(self.revision + 1),
            self.checkpointed_revision,
            tokens,
            self.unsaved_tokens + computed,
            now if self.dirty_since is None else self.dirty_since,
            stump=self.stump,
            saving=self.saving,
            later_tokens=self.later_tokens + computed,
            later_since=now if self.later_since is None else self.later_since,
        )

    def begin_checkpoint(self) -> Occupancy:
        return replace(self, saving=self.revision, later_tokens=0, later_since=None)

    def checkpointed(self, revision: Revision) -> Occupancy:
        """After `revision` was published. Work finished meanwhile leaves the stay dirty, since then."""
        done = replace(self, checkpointed_revision=revision)
        if not done.is_dirty:
            return replace(done, unsaved_tokens=0, dirty_since=None)
        if revision != self.saving:  # of a checkpoint begun before the last one, which will tell
            return done
        return replace(done, unsaved_tokens=self.later_tokens, dirty_since=self.later_since)


@dataclass(frozen=True, slots=True)
class Sight:
    """What `/slots` showed of a slot: its last task and how many tokens it holds, None where not told."""

    task: int | None
    tokens: int | None


@frozen
class SlotView:
    """`last_used` is monotonic seconds; `is_leased` whether somebody holds it now."""

    id: SlotId
    state: SlotState
    occupancy: Occupancy | None
    is_leased: bool
    last_used: float
    is_blank: bool
    """Known to hold no tokens at all."""
    is_underway: bool = False
    """The server was seen to run its request, so of its own choice it puts no other one there."""
    sight: Sight | None = field(default=None, compare=False)
    """What was seen of it at rest since it last changed; None if nobody has looked."""
    cells: int = field(default=0, compare=False)
    """Tokens that it holds at most, or that its request may come to need."""
    is_sure: bool = field(default=True, compare=False)
    """It cannot have been emptied to make room for others since it was last used or seen at rest."""

    @property
    def occupant(self) -> SessionKey | None:
        return self.occupancy.session if self.occupancy else None

    @property
    def is_dirty(self) -> bool:
        return self.occupancy is not None and self.occupancy.is_dirty

    @property
    def is_free(self) -> bool:
        """Nobody holds it and the server is not processing in it."""
        return not self.is_leased and self.state in AT_REST

    @property
    def is_in_hand(self) -> bool:
        """Something of ours is on its way to it, and the server may still believe it idle."""
        return (self.is_leased or self.state is SlotState.CANCELLING) and not self.is_underway
