"""What shows itself of a server while it lives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvproxy.identifiers import SlotId
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.telemetry.events import (
    SharedMemorySeen,
    Warned,
)
from kvproxy.upstream.facts import (
    PersistenceMode,
    ServerState,
)
from kvproxy.upstream.replies import Obstacle, Unavailable
from tests.support.fakes_core import (
    PROPS,
)
from tests.unit.upstream.test_watch import Room, met

OTHER = replace(PROPS, marker="<__media_2__>")
ASLEEP = replace(PROPS, is_sleeping=True)
LOADING = Unavailable(Obstacle.LOADING, "Loading model")


class TestOthers:
    async def test_somebody_elses_use_is_told_once(self) -> None:
        room = await met()
        room.watch.findings.found_foreign([SlotId(1)])
        room.watch.findings.found_foreign([SlotId(0)])
        (warned,) = room.sink.of(Warned)
        assert "slot 1" in warned.message


class TestUnable:
    async def test_persistence_is_off_and_said_once_and_requests_are_still_pinned(self) -> None:
        room = await met()
        for _ in range(3):
            room.watch.findings.found_unable(room.table.epoch, "not supported by multimodal")
        assert room.facts.persistence.mode is PersistenceMode.OFF
        assert not room.facts.persistence.may_save
        assert room.facts.state is ServerState.DEGRADED
        assert (room.facts.pins, room.grants) == (True, True)
        (warned,) = room.sink.of(Warned)
        assert "not supported by multimodal" in warned.message

    async def test_what_is_only_useless_to_restore_now_may_still_be_saved_for_the_next_life(self) -> None:
        room = await met()
        room.watch.findings.found_unable(room.table.epoch, "no reuse", still_saves=True)
        assert not room.facts.persistence.is_on
        assert room.facts.persistence.may_save

    async def test_what_cannot_be_saved_either_is_found_out_later(self) -> None:
        room = await met()
        for still_saves in (True, True, False, True):
            room.watch.findings.found_unable(
                room.table.epoch, f"saves: {still_saves}", still_saves=still_saves
            )
        assert not room.facts.persistence.may_save
        assert len(room.sink.of(Warned)) == 2

    async def test_the_next_life_is_tried_again(self) -> None:
        room = await met()
        room.watch.findings.found_unable(room.table.epoch, "no reuse")
        await room.ask(PROPS)
        assert room.facts.persistence.mode is PersistenceMode.OFF
        await room.ask(OTHER)
        assert room.facts.persistence.mode is PersistenceMode.PLAIN

    async def test_what_happened_in_a_passed_life_says_nothing_of_this_one(self) -> None:
        room = await met()
        passed = room.table.epoch
        await room.ask(OTHER)
        room.watch.findings.found_unable(passed, "no reuse")
        assert room.facts.persistence.is_on


class TestSharedMemory:
    async def test_a_server_whose_slots_share_one_has_room_for_as_much_as_one_slot_may_hold(self) -> None:
        room = Room()
        room.try_out(False, shares=True)
        await room.ask()
        assert (room.facts.shares_memory, room.table.pool) == (True, PROPS.n_ctx)
        (told,) = room.sink.of(SharedMemorySeen)
        assert told.tokens == PROPS.n_ctx

    @pytest.mark.parametrize("shares", [False, None])
    async def test_one_that_does_not_or_does_not_tell_has_no_bounds_beyond_each_slot(
        self, shares: bool | None
    ) -> None:
        room = Room()
        room.try_out(False, shares)
        await room.ask()
        assert (room.facts.shares_memory, room.table.pool) == (shares, None)
        assert room.sink.of(SharedMemorySeen) == []

    async def test_what_shows_it_later_counts_from_then_on_and_is_told_once(self) -> None:
        room = await met()
        for _ in range(2):
            room.watch.findings.found_shared(room.table.epoch, True)
        assert room.table.pool == PROPS.n_ctx
        assert len(room.sink.of(SharedMemorySeen)) == 1

    async def test_what_was_seen_in_a_life_that_has_passed_counts_for_nothing(self) -> None:
        room = await met()
        epoch = room.table.epoch
        await room.ask(OTHER)
        room.watch.findings.found_shared(epoch, True)
        assert (room.facts.shares_memory, room.table.pool) == (None, None)

    async def test_once_shown_that_they_do_not_it_is_not_doubted(self) -> None:
        room = await met()
        room.watch.findings.found_shared(room.table.epoch, False)
        room.watch.findings.found_shared(room.table.epoch, True)
        assert (room.facts.shares_memory, room.table.pool) == (False, None)

    async def test_only_a_server_whose_slots_share_one_clears_idle_slots(self) -> None:
        room = await met()
        room.watch.findings.found_volatile()
        assert room.table.pool == PROPS.n_ctx

    async def test_one_that_slept_is_still_known_to_share(self) -> None:
        room = Room()
        room.try_out(False, shares=True)
        await room.ask()
        await room.ask(ASLEEP)
        assert (room.facts.shares_memory, room.table.pool) == (True, PROPS.n_ctx)


async def test_a_canary_that_came_late_is_that_of_the_life_it_was_asked_in() -> None:
    room = await met()
    epoch, fingerprint = room.table.epoch, Fingerprint.from_dict({"canary": "abc"})
    room.watch.findings.found_canary(epoch, fingerprint)
    assert (room.facts.canary, room.facts.fingerprint) == ("abc", fingerprint)
    await room.ask(OTHER)
    room.watch.findings.found_canary(epoch, fingerprint)
    assert room.facts.canary != "abc"


async def test_a_server_that_was_seen_to_keep_its_slots_is_not_taken_for_one_that_clears_them() -> None:
    """An emptied slot is then the work of a stranger, or of a memory that was full."""
    room = Room()
    room.try_out(False, shares=True)
    await room.ask()
    room.watch.findings.found_volatile()
    assert (room.facts.is_volatile, room.table.is_volatile) == (False, False)
    await room.ask(ASLEEP)
    room.watch.findings.found_volatile()
    assert not room.facts.is_volatile, "it only slept"
    room.try_out(None)
    await room.ask(OTHER)
    room.watch.findings.found_volatile()
    assert room.facts.is_volatile


async def test_the_kind_of_memory_is_taken_from_the_first_file_where_nothing_else_tells() -> None:
    room = await met()
    for kind in (MemoryKind.UNKNOWN, MemoryKind.HYBRID, MemoryKind.FULL):
        room.watch.findings.found_kind(room.table.epoch, kind)
    assert room.facts.kind is MemoryKind.HYBRID


async def test_a_file_of_a_life_that_has_passed_tells_nothing_of_this_one() -> None:
    room = await met()
    epoch = room.table.epoch
    await room.ask(OTHER)
    room.watch.findings.found_kind(epoch, MemoryKind.HYBRID)
    assert room.facts.kind is MemoryKind.UNKNOWN
