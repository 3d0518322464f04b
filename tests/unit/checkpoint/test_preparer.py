from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvproxy.boundary.turn import Asked
from kvproxy.checkpoint.outcome import Outcome, Preparation, Reason
from kvproxy.checkpoint.policy import CheckpointPolicy
from kvproxy.checkpoint.restorer import MEMORY_IS_FULL
from kvproxy.errors import ErrorCode, ReplyError
from kvproxy.identifiers import Revision, SessionKey, SlotId
from kvproxy.slots.leases import Lease, Purpose, Want
from kvproxy.slots.settling import Settling
from kvproxy.slots.slot import Stump
from kvproxy.snapshots.files import FileCheck
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import digest_of_ids
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.telemetry.events import SessionCold, SessionSwitched
from kvproxy.upstream.replies import ActionFailure, Erased, Fault, Restored, Saved
from tests.support.fakes_core import (
    A,
    B,
    C,
    Late,
    World,
    generation_of,
    idle,
    manifest_of,
    settle,
    stay,
)

S0 = SlotId(0)
FAILED = ActionFailure(Fault.FAILED, "HTTP 500", 500)


async def lease_for(world: World, key: SessionKey | None) -> Lease:
    return await world.desk.acquire(Want(Purpose.PINNED, key))


async def prepare(world: World, key: SessionKey | None = A, **session: Any) -> Preparation | ReplyError:
    known = None if key is None else world.session(key, **session)
    asked = None if known is None else known.asked
    result = await world.preparer.prepare(await lease_for(world, key), known, asked)
    await settle()
    return result


def one_slot(**changes: Any) -> World:
    return World(slots=1, **changes)


def verbs(world: World) -> list[str]:
    """The calls in order, less the names of files."""
    return [entry.split(" kvp-")[0] for entry in world.log]


class TestAtOnce:
    async def test_a_lease_of_a_passed_life_has_no_slot_that_is_ready(self) -> None:
        w = World()
        w.house(1, stay(A))
        lease = await lease_for(w, A)
        w.live(1)
        assert w.preparer.at_once(lease, w.session(A)) is None

    async def test_a_resident_session_needs_nothing(self) -> None:
        w = one_slot()
        w.house(0, stay(A))
        lease = await lease_for(w, A)

        assert w.preparer.at_once(lease, w.session(A)) == Preparation(Outcome.RESIDENT)
        assert w.preparer.at_once(lease, w.session(B)) is None
        assert w.preparer.at_once(lease, None) is None
        assert w.log == []


def actions(w: World) -> list[str]:
    """The slot actions in order; publishing goes on beside them."""
    return [verb for verb in verbs(w) if verb.split()[0] in ("save", "restore", "erase")]


class TestSwitch:
    async def test_a_stored_session_comes_in_after_the_one_before_was_saved(self) -> None:
        w = one_slot()
        w.house(0, stay(B))
        w.keep(manifest_of(A))

        assert await prepare(w) == Preparation(Outcome.RESTORED, restored_tokens=1000)

        assert actions(w) == ["save 0", "restore 0"]
        assert "publish" in verbs(w)
        assert w.occupant() == "a" * 12
        (switched,) = w.sink.of(SessionSwitched)
        assert (switched.evicted, switched.session) == ("b" * 12, "a" * 12)

    async def test_a_new_session_comes_in_after_what_is_left_of_the_other_was_erased(self) -> None:
        w = one_slot()
        w.house(0, stay(B))

        assert await prepare(w) == Preparation(Outcome.COLD, Reason.NEW_SESSION)

        assert actions(w) == ["save 0", "erase 0"]
        assert (w.state(), w.occupant(), w.table.view(S0).is_blank) == ("idle", None, True)

    async def test_an_empty_slot_is_neither_saved_nor_erased(self) -> None:
        w = one_slot()
        assert await prepare(w) == Preparation(Outcome.COLD, Reason.NEW_SESSION)
        assert w.log == []
        (cold,) = w.sink.of(SessionCold)
        assert (cold.session, cold.reason) == ("a" * 12, Reason.NEW_SESSION)

    async def test_a_clean_occupant_is_not_saved_again(self) -> None:
        w = one_slot()
        w.house(0, stay(B, saved=1))
        await prepare(w)
        assert verbs(w) == ["erase 0"]

    async def test_where_a_switch_does_not_save_the_occupant_is_lost(self) -> None:
        w = one_slot(on_switch=False)
        w.house(0, stay(B))
        await prepare(w)
        assert verbs(w) == ["erase 0"]

    async def test_a_failed_save_costs_the_other_session_its_state_and_nobody_an_error(self) -> None:
        w = one_slot()
        w.house(0, stay(B))
        w.server.answer("save", FAILED)
        w.keep(manifest_of(A))

        assert await prepare(w) == Preparation(Outcome.RESTORED, restored_tokens=1000)
        assert verbs(w) == ["save 0", "delete", "mark", "restore 0", "clear"]

    async def test_what_is_left_of_one_that_opens_alike_is_of_use_and_not_erased(self) -> None:
        w = one_slot()
        w.house(0, stay(B))
        w.session(B, opening=b"same")

        await prepare(w, A, opening=b"same")

        assert "erase 0" not in verbs(w)
        assert w.state() == "idle"

    async def test_openings_that_differ_or_are_not_known_are_erased(self) -> None:
        for opening in (b"other", None):
            w = one_slot()
            w.house(0, stay(B))
            w.session(B, opening=b"same" if opening else None)
            await prepare(w, A, opening=opening)
            assert actions(w)[-1] == "erase 0"


class TestStrict:
    async def test_a_failed_save_refuses_the_request_and_the_other_session_stays(self) -> None:
        w = one_slot(is_strict=True)
        w.house(0, stay(B))
        w.server.answer("save", FAILED)

        refusal = await prepare(w)

        assert isinstance(refusal, ReplyError)
        assert (refusal.code, refusal.status, refusal.retry_after_seconds) == (ErrorCode.SAVE_FAILED, 503, 5)
        assert (w.state(), w.occupant()) == ("resident", "b" * 12)

    async def test_a_failed_restore_refuses_the_request(self) -> None:
        w = one_slot(is_strict=True)
        w.keep(manifest_of(A))
        w.server.answer("restore", FAILED)

        refusal = await prepare(w)

        assert isinstance(refusal, ReplyError)
        assert (refusal.code, refusal.status) == (ErrorCode.RESTORE_FAILED, 503)

    async def test_a_session_that_was_never_saved_is_no_failure(self) -> None:
        assert await prepare(one_slot(is_strict=True)) == Preparation(Outcome.COLD, Reason.NEW_SESSION)


class TestNobodys:
    async def test_a_request_of_nobody_finds_a_slot_in_which_nothing_is_left(self) -> None:
        w = one_slot()
        w.house(0, stay(B))

        assert await prepare(w, None) == Preparation(Outcome.COLD, Reason.NO_SNAPSHOT)

        assert actions(w) == ["save 0", "erase 0"]
        assert w.sink.of(SessionCold) == []

    async def test_a_fork_is_not_restored_and_says_that_its_session_is_busy(self) -> None:
        w = World(slots=2)
        w.house(0, stay(A))
        w.keep(manifest_of(A))
        first = await lease_for(w, A)
        w.table.serve(first.slot, first.epoch, stay(A))
        fork = await lease_for(w, A)

        result = await w.preparer.prepare(fork, w.session(A), None)

        assert result == Preparation(Outcome.COLD, Reason.SESSION_BUSY)
        assert w.log == []


class TestColdReasons:
    @pytest.mark.parametrize(
        ("known", "reason"),
        [
            ({"requests": 0}, Reason.NEW_SESSION),
            ({"requests": 3}, Reason.NO_SNAPSHOT),
            ({"requests": 3, "was_resident": True}, Reason.EVICTED),
            ({"requests": 3, "was_resident": True, "lost_to_restart": True}, Reason.SERVER_RESTARTED),
        ],
    )
    async def test_a_session_without_a_snapshot_is_told_what_became_of_it(
        self, known: dict[str, object], reason: Reason
    ) -> None:
        assert await prepare(one_slot(), A, **known) == Preparation(Outcome.COLD, reason)

    async def test_a_failed_restore_erases_what_is_left_and_says_so(self) -> None:
        w = one_slot()
        w.house(0, stay(B, saved=1))
        w.keep(manifest_of(A))
        w.server.answer("restore", Restored(1, 5000))

        assert await prepare(w) == Preparation(Outcome.COLD, Reason.RESTORE_FAILED)
        assert verbs(w)[-1] == "erase 0"

    async def test_a_snapshot_that_cannot_be_used_is_told_by_its_reason(self) -> None:
        cases: list[tuple[Reason, World]] = [
            (reason, one_slot())
            for reason in (
                Reason.FINGERPRINT_MISMATCH,
                Reason.SNAPSHOT_INVALID,
                Reason.NOT_WORTH_IT,
                Reason.PERSISTENCE_OFF,
            )
        ]
        cases[0][1].keep(manifest_of(A, fingerprint=Fingerprint.from_dict({"build": "b2"})))
        cases[1][1].keep(manifest_of(A, generation_of(invalid_reason="bad")))
        cases[2][1].keep(manifest_of(A, generation_of(tokens=5000)))
        cases[3][1].turn_off()
        for reason, w in cases:
            assert await prepare(w, A, requests=1) == Preparation(Outcome.COLD, reason)

    async def test_that_the_operator_wants_no_restores_is_not_told_as_the_servers_doing(self) -> None:
        w = one_slot(restores=False)
        w.keep(manifest_of(A))
        assert await prepare(w, A, requests=1) == Preparation(Outcome.COLD, Reason.RESTORE_OFF)
        other = one_slot(restores=False)
        assert await prepare(other, B) == Preparation(Outcome.COLD, Reason.NEW_SESSION)

    async def test_an_open_breaker_is_told(self) -> None:
        w = one_slot(max_failures=1)
        w.keep(manifest_of(A))
        w.server.answer("restore", FAILED)
        await w.restorer.restore(S0, w.table.epoch, A, generation_of().revision)

        assert await prepare(w) == Preparation(Outcome.COLD, Reason.BREAKER_OPEN)


class TestLateActions:
    async def test_after_a_late_save_the_slot_is_served_as_it_is_and_nothing_more_is_asked_of_it(
        self,
    ) -> None:
        w = one_slot()
        w.house(0, stay(B))
        w.keep(manifest_of(A))
        w.server.answer("save", Late())

        assert await prepare(w) == Preparation(Outcome.COLD, Reason.RESTORE_FAILED)
        assert (verbs(w), w.state()) == (["save 0"], "quarantined")

    async def test_a_late_erase_leaves_a_slot_of_which_nothing_is_believed_until_it_ends(self) -> None:
        w = one_slot()
        w.house(0, stay(B))
        late = Late()
        w.server.answer("erase", late)

        assert await prepare(w) == Preparation(Outcome.COLD, Reason.NEW_SESSION)
        assert w.state() == "quarantined"

        late.end(Erased(10))
        await settle()
        assert (w.state(), w.changes) == ("idle", 1)

    async def test_an_erase_that_fails_leaves_leftovers_and_does_not_count(self) -> None:
        w = one_slot(max_failures=1)
        w.house(0, stay(B))
        w.server.answer("erase", FAILED)

        await prepare(w)

        assert (w.state(), w.table.view(S0).is_blank, w.actions.are_allowed) == ("idle", False, True)


class TestLives:
    async def test_a_lease_that_is_void_already_prepares_nothing(self) -> None:
        w = World(slots=2)
        w.house(1, stay(A))
        lease = await lease_for(w, A)
        w.live(1)

        result = await w.preparer.prepare(lease, w.session(A), None)

        assert result == Preparation(Outcome.COLD, Reason.SERVER_RESTARTED)
        assert w.log == []

    async def test_a_life_that_passes_during_the_save_is_left_alone(self) -> None:
        w = one_slot()
        w.house(0, stay(B))
        w.keep(manifest_of(A))

        def pass_away() -> Saved:
            w.live(1)
            w.house(0, stay(B))
            return Saved(1000, 5000)

        w.server.answer("save", pass_away)

        result = await prepare(w)

        assert isinstance(result, Preparation)
        assert result.outcome is Outcome.COLD
        assert verbs(w) == ["save 0", "delete"]
        assert w.occupant() == "b" * 12


class TestVacate:
    async def test_a_slot_that_is_nobodys_needs_no_leaving(self) -> None:
        w = one_slot()
        lease = await lease_for(w, A)
        assert await w.preparer.vacate(lease, S0, None) is None
        assert w.sink.events == []


class TestDraftModel:
    async def test_a_cold_start_is_made_in_an_erased_slot(self) -> None:
        w = one_slot()
        w.table.speculates = True
        w.table.serve(S0, w.table.epoch, None)
        w.table.served(S0, w.table.epoch, None)
        await prepare(w)
        assert actions(w) == ["erase 0"]

    async def test_a_slot_is_emptied_under_the_request_that_failed_in_it(self) -> None:
        w = one_slot()
        lease = await lease_for(w, A)
        w.table.serve(S0, w.table.epoch, stay(A))
        assert await w.preparer.empty(lease)
        w.table.served(S0, w.table.epoch, stay(A))
        assert w.occupant() == "a" * 12

    async def test_who_waits_for_a_slot_whose_client_left_meanwhile_gets_it_once_it_is_empty(self) -> None:
        w = one_slot()
        erased: asyncio.Future[Erased] = asyncio.get_running_loop().create_future()
        w.server.answer("erase", erased)
        lease = await lease_for(w, A)
        w.table.serve(S0, w.table.epoch, stay(A))
        emptying = asyncio.ensure_future(w.preparer.empty(lease))
        await settle()
        w.table.broke_off(S0, w.table.epoch, Settling(S0, was_seen=True))
        lease.release()
        w.clock.advance(1)
        w.table.seen([idle(0)])
        assert w.state() == "quarantined"

        erased.set_result(Erased(1))
        await emptying

        assert (w.state(), w.changes) == ("idle", 1)

    @pytest.mark.parametrize("is_late", [True, False])
    async def test_it_says_so_when_that_cannot_be_done(self, is_late: bool) -> None:
        w = one_slot()
        w.server.answer("erase", Late() if is_late else FAILED)
        lease = await lease_for(w, A)
        w.table.serve(S0, w.table.epoch, stay(A))
        assert not await w.preparer.empty(lease)
        w.table.served(S0, w.table.epoch, stay(A))
        assert w.state() == ("quarantined" if is_late else "resident")


class TestRoom:
    """The server's memory is shared, and full of other slots when session A is to come back to slot 0."""

    FULL = ActionFailure(
        Fault.REFUSED, f"Unable to restore slot: {MEMORY_IS_FULL} or invalid slot save file", 400
    )

    def world(self, *restores: object) -> World:
        w = World()
        w.keep(manifest_of(A, generation_of()))
        w.session(A, requests=1)
        w.server.answer("restore", *restores)
        return w

    async def test_other_idle_slots_are_saved_and_emptied_and_it_is_tried_again(self) -> None:
        w = self.world(self.FULL, Restored(1000, 5000))
        w.house(1, stay(B))

        assert await prepare(w) == Preparation(Outcome.RESTORED, restored_tokens=1000)

        done = [verb for verb in verbs(w) if verb.split()[0] in ("save", "restore", "erase")]
        assert done == ["restore 0", "save 1", "erase 1", "restore 0"]
        assert (w.occupant(0), w.occupant(1), w.table.view(SlotId(1)).is_blank) == ("a" * 12, None, True)
        assert w.store.find_any(B)

    async def test_one_that_cannot_be_saved_keeps_its_place(self) -> None:
        w = self.world(self.FULL)
        w.house(1, stay(B))
        w.server.answer("save", FAILED)

        assert await prepare(w) == Preparation(Outcome.COLD, Reason.RESTORE_FAILED)

        assert w.occupant(1) == "b" * 12
        assert w.store.find_any(A)[0].current.is_valid
        assert verbs(w).count("restore 0") == 1

    async def test_running_slots_are_left_alone(self) -> None:
        w = self.world(self.FULL)
        w.table.hold([SlotId(1)], 99)
        w.table.serve(SlotId(1), w.table.epoch, stay(B))

        assert await prepare(w) == Preparation(Outcome.COLD, Reason.RESTORE_FAILED)
        assert not any("1" in verb for verb in verbs(w))

    @pytest.mark.parametrize("verb", ["save", "erase"])
    async def test_a_server_that_has_fewer_slots_by_now_is_left_alone(self, verb: str) -> None:
        w = World(slots=3)
        w.keep(manifest_of(A, generation_of()))
        w.house(1, stay(B))
        w.house(2, stay(C))

        def pass_away() -> object:
            w.live(1)
            return Erased(1) if verb == "erase" else Saved(1000, 5000)

        w.server.answer("restore", self.FULL)
        w.server.answer(verb, pass_away)

        result = await prepare(w)

        assert isinstance(result, Preparation)
        assert result.outcome is Outcome.COLD
        assert not any("2" in entry for entry in verbs(w))

    async def test_one_that_has_them_once_the_save_is_published_is_left_alone_too(self) -> None:
        w = World(slots=2)
        w.keep(manifest_of(A, generation_of()))
        w.house(1, stay(B))

        def pass_away() -> FileCheck:
            w.live(1)
            return FileCheck()

        w.server.answer("restore", self.FULL)
        w.files.durable = pass_away

        result = await prepare(w)

        assert isinstance(result, Preparation)
        assert "erase 1" not in verbs(w)

    async def test_if_nothing_else_takes_room_in_the_end_it_was_the_file(self) -> None:
        w = self.world(self.FULL)
        w.house(1, stay(B, saved=1))

        assert await prepare(w) == Preparation(Outcome.COLD, Reason.RESTORE_FAILED)

        assert verbs(w).count("restore 0") == 2
        assert not w.store.find_any(A)[0].current.is_valid


class TestRequest:
    """Its document is kept beyond the preparation only where the slot may have to be brought back to it."""

    ASKED = Asked("chat/completions", {"messages": []})

    @pytest.mark.parametrize("kind", MemoryKind)
    @pytest.mark.parametrize("is_resident", [True, False])
    async def test_it_is_held_for_memory_that_cannot_roll_back(
        self, kind: MemoryKind, is_resident: bool
    ) -> None:
        w = one_slot()
        w.standing.set(kind=kind)
        if is_resident:
            w.house(0, stay(A))
        session = w.session(A, asked=self.ASKED)
        lease = await lease_for(w, A)
        if w.preparer.at_once(lease, session) is None:
            await w.preparer.prepare(lease, session, session.asked)
        assert session.asked == (None if kind is MemoryKind.FULL else self.ASKED)


class TestWay:
    """All slots share room for 2500 tokens; sessions B and C are idle with 1000 each, and A needs more."""

    POOL = 2500

    def world(self, b: int = 1, c: int = 0) -> World:
        """`b` and `c`: which revision of each is saved, of 1."""
        w = World(slots=3)
        w.table.pool = self.POOL
        w.house(1, stay(B, saved=b))
        w.clock.advance(1)
        w.house(2, stay(C, saved=c))
        return w

    async def lease(self, w: World, cells: int) -> Lease:
        return await w.desk.acquire(Want(Purpose.PINNED, A, cells))

    async def make_way(self, w: World, cells: int) -> list[str]:
        lease = await self.lease(w, cells)
        await w.preparer.make_way(lease, cells)
        await settle()
        return [verb for verb in verbs(w) if verb.split()[0] in ("save", "erase")]

    async def test_nobody_is_disturbed_where_there_is_room(self) -> None:
        w = self.world()
        lease = await self.lease(w, 500)
        assert w.preparer.is_certain(lease)
        await w.preparer.make_certain(lease)
        await w.preparer.make_way(lease, 500)
        assert w.log == []

    async def test_where_slots_share_nothing_there_is_never_a_crowd(self) -> None:
        w = self.world()
        w.table.pool = None
        lease = await self.lease(w, 10**6)
        assert w.preparer.is_certain(lease)
        await w.preparer.make_way(lease, 10**6)
        assert w.log == []

    async def test_where_a_launch_clears_the_idle_slots_it_makes_its_own_room(self) -> None:
        w = self.world()
        w.table.is_volatile = True
        assert w.preparer.is_certain(await self.lease(w, self.POOL))

    async def test_the_saved_goes_before_the_dirty_and_only_as_many_as_it_takes(self) -> None:
        w = self.world()
        assert not w.preparer.is_certain(await self.lease(w, 1000))
        assert await self.make_way(self.world(), 1000) == ["erase 1"]
        assert await self.make_way(self.world(b=0, c=1), 1000) == ["erase 2"]

    async def test_the_dirty_is_saved_before(self) -> None:
        w = self.world()
        assert await self.make_way(w, 2000) == ["erase 1", "save 2", "erase 2"]
        assert w.store.find_any(C)
        assert w.table.view(SlotId(2)).cells == 0

    async def test_one_that_cannot_be_saved_keeps_its_place_and_nobody_waits_for_ever(self) -> None:
        w = self.world()
        w.server.answer("save", FAILED)
        assert await self.make_way(w, 2000) == ["erase 1", "save 2"]
        assert w.occupant(2) == "c" * 12

    async def test_a_look_that_shows_room_spares_everybody(self) -> None:
        w = self.world()
        w.clock.advance(1)
        w.server.answer("slots", (idle(0), idle(1, tokens=1000), idle(2, tokens=300)))
        lease = await self.lease(w, 1000)
        await w.preparer.make_certain(lease)
        assert w.log == ["slots"]
        assert w.preparer.is_certain(lease)

    async def test_a_look_that_shows_its_own_slot_emptied_takes_the_belief_away(self) -> None:
        w = self.world()
        w.house(0, stay(A))
        w.clock.advance(1)
        w.server.answer("slots", (idle(0, tokens=0), idle(1, tokens=1000), idle(2, tokens=1000)))
        lease = await self.lease(w, 1000)
        assert not w.preparer.is_certain(lease), "all hold more than there is"
        await w.preparer.make_certain(lease)
        assert w.preparer.at_once(lease, w.session(A)) is None

    async def test_one_that_is_too_small_to_keep_goes_unsaved(self) -> None:
        w = World(slots=2, policy=CheckpointPolicy(min_tokens=5000))
        w.table.pool = self.POOL
        w.house(1, stay(B))
        assert await self.make_way(w, 2000) == ["erase 1"]

    async def test_running_slots_are_left_alone(self) -> None:
        w = self.world()
        running = await w.desk.acquire(Want(Purpose.PINNED, C, 1000))
        w.table.serve(running.slot, running.epoch, stay(C))
        lease = w.desk._lease(Want(Purpose.PINNED, A, 2000), (S0,), 0.0)
        await w.preparer.make_way(lease, 2000)
        assert verbs(w) == ["erase 1"]

    async def test_a_restore_makes_its_way_first_and_is_asked_for_once(self) -> None:
        w = self.world()
        w.keep(manifest_of(A, generation_of()))

        assert await prepare(w, requests=1) == Preparation(Outcome.RESTORED, restored_tokens=1000)

        done = [verb for verb in verbs(w) if verb.split()[0] in ("save", "restore", "erase")]
        assert done == ["erase 1", "restore 0"]

    async def test_room_that_only_came_by_emptying_others_shows_that_it_is_shared(self) -> None:
        w = World()
        w.keep(manifest_of(A, generation_of()))
        w.server.answer("restore", TestRoom.FULL, Restored(1000, 5000))
        w.house(1, stay(B))
        await prepare(w, requests=1)
        assert w.shares == [True]


class TestStump:
    """Session A was restored, with nothing but the end of its sliding window, and has gone on since."""

    WHOLE = "the same beginning"
    IDS = tuple(f"<user>{WHOLE}".encode())

    def world(self, key: SessionKey = A, **changes: Any) -> World:
        w = one_slot(**changes)
        w.standing.set(kind=MemoryKind.SLIDING_WINDOW)
        stump = Stump(len(self.IDS), digest_of_ids(self.IDS))
        w.house(0, replace(stay(key, revision=3, saved=3), stump=stump))
        return w

    def asked(self, text: str) -> Asked:
        return Asked("chat/completions", {"messages": [{"role": "user", "content": text}]})

    async def test_a_prompt_that_reaches_beyond_it_goes_on_there(self) -> None:
        w = self.world()
        session = w.session(A, asked=self.asked(self.WHOLE + " and more"))
        assert w.preparer.at_once(await lease_for(w, A), session) is None
        w = self.world()
        result = await prepare(w, asked=session.asked)
        assert result == Preparation(Outcome.RESIDENT)
        assert (w.occupant(), actions(w)) == ("a" * 12, [])

    @pytest.mark.parametrize("text", ["the same begin", "another beginning altogether", None])
    async def test_one_that_does_not_or_is_not_known_to_uses_nothing_of_it(self, text: str | None) -> None:
        w = self.world()
        asked = None if text is None else self.asked(text)
        result = await prepare(w, asked=asked)
        assert result == Preparation(Outcome.COLD, Reason.PREFIX_DIVERGED, from_scratch=True)
        assert actions(w) == []

    async def test_one_that_opens_alike_finds_nothing_left_of_it(self) -> None:
        w = self.world(B)
        for key in (A, B):
            w.session(key, opening=b"alike")
        result = await prepare(w)
        assert actions(w) == ["erase 0"]
        assert isinstance(result, Preparation)
        assert not result.from_scratch

    async def test_or_uses_nothing_of_it_where_that_could_not_be_erased(self) -> None:
        w = self.world(B)
        w.server.answer("erase", FAILED)
        result = await prepare(w)
        assert isinstance(result, Preparation)
        assert (result.outcome, result.from_scratch) == (Outcome.COLD, True)

    async def test_to_start_over_in_it_is_to_erase_it(self) -> None:
        w = self.world()
        assert await w.preparer.start_over(await lease_for(w, A))
        assert (actions(w), w.occupant()) == (["erase 0"], None)

    async def test_it_is_told_when_that_could_not_be_done(self) -> None:
        w = self.world()
        w.server.answer("erase", FAILED)
        assert not await w.preparer.start_over(await lease_for(w, A))

    async def test_nor_where_a_late_save_keeps_the_slot_from_being_erased(self) -> None:
        w = self.world(B)
        stay_of_b = w.table.view(S0).occupancy
        assert stay_of_b is not None
        w.house(0, replace(stay_of_b, revision=Revision(4)))
        w.server.answer("save", Late())
        result = await prepare(w)
        assert w.state() == "quarantined"
        assert isinstance(result, Preparation)
        assert (result.outcome, result.from_scratch) == (Outcome.COLD, True)

    async def test_it_is_the_request_itself_that_counts_and_no_newer_one_of_its_session(self) -> None:
        w = self.world()
        newer = w.session(A, asked=self.asked(self.WHOLE + " and more"))
        result = await w.preparer.prepare(await lease_for(w, A), newer, self.asked("another beginning"))
        assert result == Preparation(Outcome.COLD, Reason.PREFIX_DIVERGED, from_scratch=True)
