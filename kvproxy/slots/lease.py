"""One lease: the right to slots, with one end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from kvproxy.errors import InvariantError
from kvproxy.identifiers import Epoch, SlotId
from kvproxy.slots.want import Want


class Desk(Protocol):
    """Where a lease was granted and goes back to."""

    @property
    def epoch(self) -> Epoch: ...

    def narrow(self, lease: Lease, slots: tuple[SlotId, ...]) -> None: ...

    def release(self, lease: Lease) -> None: ...


@dataclass(slots=True, eq=False)
class Lease:
    """The right to `slots` until `release`. Void once the server's life it was granted in has passed."""

    id: int
    want: Want
    slots: tuple[SlotId, ...]
    epoch: Epoch
    is_fork: bool
    waited_seconds: float
    _desk: Desk = field(repr=False)
    is_released: bool = False
    has_departed: bool = False
    """Its request may be launched any moment."""

    @property
    def slot(self) -> SlotId:
        """The slot of a lease of one."""
        try:
            (slot,) = self.slots
        except ValueError:
            raise InvariantError(f"lease {self.id} holds {len(self.slots)} slots, not one") from None
        return slot

    @property
    def is_void(self) -> bool:
        return self.epoch != self._desk.epoch

    def part(self, slot: SlotId) -> Lease:
        """The same right to one of its slots; this lease gives it back."""
        return replace(self, slots=(slot,))

    def narrow(self, slots: tuple[SlotId, ...]) -> None:
        """Keep only `slots`; the gate of a floating launch opens."""
        self._desk.narrow(self, slots)

    def release(self) -> None:
        self._desk.release(self)
