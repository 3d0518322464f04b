from __future__ import annotations

import pytest

from kvproxy.errors import InvariantError
from kvproxy.identifiers import Epoch, SlotId
from kvproxy.slots.lease import Lease
from kvproxy.slots.want import Purpose, Want


class FakeDesk:
    def __init__(self) -> None:
        self.epoch = Epoch(1)
        self.told: list[object] = []

    def narrow(self, lease: Lease, slots: tuple[SlotId, ...]) -> None:
        self.told.append(slots)

    def release(self, lease: Lease) -> None:
        self.told.append("release")


def lease_of(desk: FakeDesk, *slots: int) -> Lease:
    held = tuple(SlotId(slot) for slot in slots)
    return Lease(1, Want(Purpose.PINNED), held, desk.epoch, False, 0.0, desk)


def test_a_lease_of_one_slot_names_it_and_one_of_several_has_none_to_name() -> None:
    desk = FakeDesk()
    assert lease_of(desk, 3).slot == 3
    with pytest.raises(InvariantError):
        _ = lease_of(desk, 0, 1).slot


def test_it_is_void_once_the_life_it_was_granted_in_has_passed() -> None:
    desk = FakeDesk()
    lease = lease_of(desk, 0)
    assert not lease.is_void
    desk.epoch = Epoch(2)
    assert lease.is_void


def test_what_is_done_with_it_is_done_by_its_desk() -> None:
    desk = FakeDesk()
    lease = lease_of(desk, 0, 1)
    lease.narrow((SlotId(1),))
    lease.release()
    assert desk.told == [(1,), "release"]
