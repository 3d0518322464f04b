from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvproxy.checkpoint.checkpointer import Checkpoint
from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.checkpoint.policy import CheckpointPolicy
from kvproxy.identifiers import Epoch, SlotId
from kvproxy.slots.settling import QUIET_SECONDS
from kvproxy.snapshots.files import FileCheck
from kvproxy.snapshots.manifest import FileIdentity, Manifest
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.names import is_of
from kvproxy.telemetry.events import CheckpointEnded, CheckpointStarted, PersistenceTripped, TaskDied
from kvproxy.upstream.breaker import BreakerState
from kvproxy.upstream.replies import ActionFailure, Fault, Saved
from tests.support.fakes_core import (
    FINGERPRINT,
    OWNER,
    A,
    B,
    Late,
    World,
    generation_of,
    manifest_of,
    settle,
    stay,
)

S0 = SlotId(0)
O = CheckpointOutcome  # noqa: E741 - the outcomes, many times over
REFUSED = ActionFailure(Fault.REFUSED, "no room on the device", 400)
GONE = ActionFailure(Fault.UNREACHABLE, "connection reset")


def world(answer: object = None, **changes: object) -> World:
    """A dirty session A in slot 0."""
    made = World(**changes)  # type: ignore[arg-type]
    made.house(0, stay(A))
    if answer is not None:
        made.server.answer("save", answer)
    return made


async def save(world: World, trigger: Trigger = Trigger.IDLE) -> Checkpoint:
    result = await world.checkpointer.save(S0, world.table.epoch, trigger)
    await settle()
    return result


def stored(world: World) -> Manifest | None:
    return world.store.find(A, FINGERPRINT)


class TestPublished:
    async def test_it_is_saved_verified_published_and_clean(self) -> None:
        w = world()

        result = await save(w)

        assert result == Checkpoint(O.PUBLISHED, 1000, 5000)
        assert w.log == ["save 0", "publish"]
        assert (w.state(), w.table.view(S0).is_dirty) == ("resident", False)
        manifest = stored(w)
        assert manifest is not None
        one = manifest.current
        assert (one.tokens, one.size_bytes, one.revision, one.slot) == (1000, 5000, 1, 0)
        assert is_of(OWNER, one.name)

    async def test_it_is_told_when_it_begins_and_when_it_ends(self) -> None:
        w = world()

        await save(w, Trigger.SWITCH)

        (started,), (ended,) = w.sink.of(CheckpointStarted), w.sink.of(CheckpointEnded)
        assert (started.slot, started.session, started.trigger) == (0, "a" * 12, Trigger.SWITCH)
        assert (ended.outcome, ended.tokens, ended.trigger) == (O.PUBLISHED, 1000, Trigger.SWITCH)

    async def test_the_generation_that_was_superseded_is_deleted_after_the_new_one_stands(self) -> None:
        w = world()
        oldest, older = generation_of(), generation_of()
        w.keep(manifest_of(A, older, oldest))

        await save(w)

        assert w.log == ["save 0", "publish", "delete"]
        assert w.files.deleted == [oldest.name]
        manifest = stored(w)
        assert manifest is not None
        assert manifest.previous == older

    async def test_two_saves_never_use_the_same_name(self) -> None:
        w = world()
        await save(w)
        w.house(0, stay(A, revision=2, saved=1))
        await save(w)

        manifest = stored(w)
        assert manifest is not None
        assert len({one.name for one in manifest.generations}) == 2

    async def test_the_file_is_hashed_afterwards_and_its_identity_kept(self) -> None:
        w = world()
        identity = FileIdentity(device=1, inode=2, size=5000, mtime_ns=3, ctime_ns=4)
        w.files.durable = FileCheck(identity=identity)
        w.files.sha256 = "f" * 64

        await save(w)

        manifest = stored(w)
        assert manifest is not None
        assert (manifest.current.identity, manifest.current.sha256) == (identity, "f" * 64)

    async def test_retention_is_asked_to_look_after_each_publication(self) -> None:
        w = world()
        looked: list[str] = []
        w.checkpointer.publisher.published = lambda: looked.append("look")
        await save(w)
        assert looked == ["look"]

    async def test_the_session_remembers_the_revision_that_was_saved(self) -> None:
        w = World()
        w.house(0, stay(A, revision=7, saved=3))
        await save(w)
        session = w.registry.find(A)
        assert session is not None
        assert session.revision == 7

    async def test_a_session_that_was_forgotten_meanwhile_is_still_saved(self) -> None:
        w = world()
        w.registry.forget(A)
        assert (await save(w)).outcome is O.PUBLISHED

    async def test_work_of_a_slot_whose_size_is_not_known_is_saved(self) -> None:
        w = World()
        w.house(0, stay(A, tokens=None))
        w.server.answer("save", Saved(12, 5000))
        assert (await save(w)).outcome is O.PUBLISHED


class TestSkipped:
    async def test_a_clean_slot_is_not_saved_again(self) -> None:
        w = World()
        w.house(0, stay(A, saved=1))
        assert (await save(w)).outcome is O.CLEAN
        assert (w.log, w.sink.events) == ([], [])

    async def test_a_slot_without_an_occupant_or_of_a_passed_life_is_superseded(self) -> None:
        w = World()
        assert (await save(w)).outcome is O.SUPERSEDED
        w.house(0, stay(A))
        assert (await w.checkpointer.save(S0, Epoch(0), Trigger.IDLE)).outcome is O.SUPERSEDED
        assert w.log == []

    async def test_a_slot_that_serves_is_superseded(self) -> None:
        w = world()
        w.table.serve(S0, w.table.epoch, stay(A))
        assert (await save(w)).outcome is O.SUPERSEDED

    async def test_a_small_slot_is_saved_by_order_only(self) -> None:
        w = World(policy=CheckpointPolicy(min_tokens=256))
        w.house(0, stay(A, tokens=100))
        w.server.answer("save", Saved(100, 500))

        assert (await save(w)).outcome is O.TOO_SMALL
        assert (await save(w, Trigger.MANUAL)).outcome is O.PUBLISHED

    async def test_nothing_is_saved_where_persistence_is_off(self) -> None:
        w = world()
        w.turn_off()
        assert (await save(w)).outcome is O.OFF
        assert w.log == []

    async def test_nothing_is_saved_of_a_session_whose_client_forbade_the_disk(self) -> None:
        w = world()
        w.session(A, may_persist=False)
        assert (await save(w, Trigger.MANUAL)).outcome is O.UNWANTED
        assert w.log == []

    async def test_nothing_is_saved_before_the_server_told_what_it_runs(self) -> None:
        w = world()
        w.standing.set(fingerprint=None)
        assert (await save(w)).outcome is O.OFF

    async def test_an_open_breaker_spares_the_call(self) -> None:
        w = world(REFUSED, max_failures=1)
        await save(w)
        w.log.clear()

        assert (await save(w)).outcome is O.BREAKER_OPEN
        assert w.log == []


class TestFailed:
    async def test_a_refused_save_leaves_the_slot_dirty_and_no_half_file(self) -> None:
        w = world(REFUSED)

        result = await save(w)

        assert (result.outcome, result.detail) == (O.REFUSED, "no room on the device")
        assert (w.state(), w.table.view(S0).is_dirty) == ("resident", True)
        assert w.log == ["save 0", "delete"]
        assert stored(w) is None

    async def test_what_was_published_before_a_failed_save_stands(self) -> None:
        w = world(REFUSED)
        kept = w.keep(manifest_of(A))
        await save(w)
        assert stored(w) == kept

    async def test_failures_count_against_the_breaker(self) -> None:
        w = world(REFUSED, max_failures=2)
        await save(w)
        assert w.sink.of(PersistenceTripped) == []
        await save(w)
        (tripped,) = w.sink.of(PersistenceTripped)
        assert tripped.reason == "no room on the device"

    @pytest.mark.parametrize("fault", [Fault.UNREACHABLE, Fault.UNAUTHORIZED])
    async def test_a_server_that_is_gone_or_wants_a_key_says_nothing_about_saving(self, fault: Fault) -> None:
        w = world(ActionFailure(fault, "no"), max_failures=1)

        result = await save(w)

        assert result.outcome is (O.UNREACHABLE if fault is Fault.UNREACHABLE else O.REFUSED)
        assert w.actions.breaker_state is BreakerState.CLOSED
        assert w.state() == "resident"

    async def test_a_slot_that_turns_out_to_be_empty_is_nobodys_and_makes_us_ask_why(self) -> None:
        w = world(Saved(0, 40), max_failures=1)

        result = await save(w)

        assert result.outcome is O.EMPTY
        assert (w.state(), w.occupant(), w.table.view(S0).is_blank) == ("idle", None, True)
        assert w.emptied == [S0]
        assert w.log == ["save 0", "delete"]
        assert w.actions.breaker_state is BreakerState.CLOSED

    async def test_a_save_of_too_few_tokens_is_another_content_and_not_published(self) -> None:
        w = world(Saved(949, 5000))
        kept = w.keep(manifest_of(A))

        result = await save(w)

        assert result.outcome is O.IMPLAUSIBLE
        assert result.detail == "the server saved 949 tokens where 1000 were expected"
        assert (w.state(), w.table.view(S0).is_dirty, stored(w)) == ("resident", True, kept)
        assert w.log == ["save 0", "delete"]

    async def test_a_save_of_a_few_tokens_less_is_plausible(self) -> None:
        assert (await save(world(Saved(950, 5000)))).outcome is O.PUBLISHED

    async def test_a_file_that_is_not_what_the_server_claims_is_not_published(self) -> None:
        w = world(max_failures=1)
        w.files.saved = FileCheck("is 1 byte short")

        result = await save(w)

        assert (result.outcome, result.detail) == (O.IMPLAUSIBLE, "is 1 byte short")
        assert (w.log, w.table.view(S0).is_dirty) == (["save 0", "delete"], True)
        assert w.actions.breaker_state is BreakerState.OPEN

    async def test_a_manifest_that_cannot_be_written_leaves_no_file_without_one(self) -> None:
        w = world(max_failures=1)
        w.store.fails = True

        result = await save(w)

        assert (result.outcome, result.detail) == (O.STORE_FAILED, "the disk is full")
        assert w.log == ["save 0", "publish", "delete"]
        assert (w.state(), w.table.view(S0).is_dirty) == ("resident", True)
        assert w.actions.breaker_state is BreakerState.OPEN

    async def test_a_save_that_never_got_its_turn_is_busy_and_harms_nothing(self) -> None:
        w = world(timeout_seconds=0.0)
        w.actions.learn(1000, 0)  # tokens weigh nothing, so there is no patience at all
        w.server.answer("erase", Late())
        await w.actions.run(lambda: w.server.start_erase(SlotId(1)), w.table.epoch, 1.0, lambda fate: None)

        result = await save(w)

        assert (result.outcome, w.state()) == (O.BUSY, "resident")
        assert w.log == ["erase 1"]
        assert w.checkpointer.names_in_flight() == set()


class TestLate:
    async def test_a_save_past_its_deadline_leaves_a_slot_of_which_nothing_is_believed(self) -> None:
        w = world(Late(), max_failures=1)

        result = await save(w)

        assert result.outcome is O.TIMED_OUT
        assert (w.state(), w.occupant()) == ("quarantined", None)
        assert w.actions.breaker_state is BreakerState.OPEN
        assert w.files.deleted == [], "it is still being written"

    async def test_its_name_is_in_flight_until_its_fate_is_known_and_its_file_gone(self) -> None:
        late = Late()
        w = world(late)
        await save(w)
        (name,) = w.checkpointer.names_in_flight()

        late.end(Saved(1000, 5000))
        await settle()

        assert w.files.deleted == [name]
        assert w.checkpointer.names_in_flight() == set()
        assert (w.state(), w.changes) == ("idle", 1)
        assert stored(w) is None

    async def test_its_fate_says_nothing_of_a_later_life(self) -> None:
        late = Late()
        w = world(late)
        await save(w)
        w.live(1)
        w.house(0, stay(B))

        late.end(Saved(1000, 5000))
        await settle()

        assert (w.state(), w.occupant()) == ("resident", "b" * 12)
        assert w.sink.of(TaskDied) == []


class TestLives:
    async def test_a_save_during_which_the_servers_life_passed_is_discarded(self) -> None:
        w = world(max_failures=1)

        def pass_away() -> Saved:
            w.live(2)
            return Saved(1000, 5000)

        w.server.answer("save", pass_away)
        result = await save(w)

        assert result.outcome is O.SUPERSEDED
        assert (w.log, stored(w)) == (["save 0", "delete"], None)
        assert w.actions.breaker_state is BreakerState.CLOSED

    async def test_a_life_that_passes_while_the_file_is_verified_leaves_the_new_slot_alone(self) -> None:
        w = world()

        def pass_away() -> FileCheck:
            w.live(2)
            w.house(0, stay(B))
            return FileCheck()

        w.files.saved = pass_away
        result = await save(w)

        assert result.outcome is O.PUBLISHED, "the file was complete before"
        assert (w.occupant(), w.table.view(S0).is_dirty) == ("b" * 12, True)

    async def test_saves_of_two_lives_of_a_slot_do_not_get_in_each_others_way(self) -> None:
        w = world()
        verified: asyncio.Future[FileCheck] = asyncio.get_running_loop().create_future()
        w.files.saved = verified
        first = asyncio.ensure_future(w.checkpointer.save(S0, w.table.epoch, Trigger.IDLE))
        await settle()
        w.live(2)
        w.house(0, stay(B))
        second = asyncio.ensure_future(w.checkpointer.save(S0, w.table.epoch, Trigger.IDLE))
        await settle()
        joined = asyncio.ensure_future(w.checkpointer.joined(S0))

        verified.set_result(FileCheck())

        assert (await first).outcome is O.PUBLISHED
        assert (await second).outcome is O.PUBLISHED
        assert await joined == await second
        assert await w.checkpointer.joined(S0) is None


class TestPublishing:
    """What follows once the file is written needs no slot."""

    async def test_the_slot_is_free_and_dirty_until_the_snapshot_is_published(self) -> None:
        w = world()
        durable: asyncio.Future[FileCheck] = asyncio.get_running_loop().create_future()
        w.files.durable = durable

        publishing = await w.checkpointer.write(S0, w.table.epoch, Trigger.SWITCH)

        assert isinstance(publishing, asyncio.Task)
        assert (w.state(), w.table.view(S0).is_dirty) == ("resident", True)
        durable.set_result(FileCheck())
        assert (await publishing).outcome is O.PUBLISHED
        assert not w.table.view(S0).is_dirty

    async def test_what_is_being_published_is_not_saved_again(self) -> None:
        w = world()
        durable: asyncio.Future[FileCheck] = asyncio.get_running_loop().create_future()
        w.files.durable = durable

        first = await w.checkpointer.write(S0, w.table.epoch, Trigger.IDLE)
        second = await w.checkpointer.write(S0, w.table.epoch, Trigger.SWITCH)
        durable.set_result(FileCheck())

        assert first is second
        assert w.log.count("save 0") == 1

    async def test_a_newer_revision_is_published_after_the_older_one(self) -> None:
        w = world()
        durable: asyncio.Future[FileCheck] = asyncio.get_running_loop().create_future()
        w.files.durable = durable
        first = await w.checkpointer.write(S0, w.table.epoch, Trigger.IDLE)
        await settle()
        w.files.durable = FileCheck()
        w.house(0, stay(A, revision=9, saved=0))
        second = await w.checkpointer.write(S0, w.table.epoch, Trigger.IDLE)
        assert isinstance(first, asyncio.Task)
        assert isinstance(second, asyncio.Task)
        await settle()
        assert not second.done()

        durable.set_result(FileCheck())
        await second

        manifest = stored(w)
        assert manifest is not None
        assert manifest.current.revision == 9

    async def test_a_file_that_cannot_be_made_durable_is_deleted_and_the_session_stays_dirty(self) -> None:
        w = world()
        w.files.durable = FileCheck("the disk is gone")

        assert (await save(w)).outcome is O.STORE_FAILED
        assert len(w.files.deleted) == 1
        assert w.table.view(S0).is_dirty

    async def test_a_session_that_comes_back_waits_for_what_is_being_published_of_it(self) -> None:
        w = world()
        durable: asyncio.Future[FileCheck] = asyncio.get_running_loop().create_future()
        w.files.durable = durable
        await w.checkpointer.write(S0, w.table.epoch, Trigger.SWITCH)
        waiting = asyncio.ensure_future(w.checkpointer.publisher.settled(A))
        await settle()
        assert not waiting.done()

        durable.set_result(FileCheck())
        await waiting

        assert stored(w) is not None


class TestJoined:
    async def test_a_save_in_flight_is_waited_for_instead_of_making_another(self) -> None:
        w = world()
        gate: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
        w.server.answer("save", gate)
        saving = asyncio.ensure_future(w.checkpointer.save(S0, w.table.epoch, Trigger.IDLE))
        await settle()
        joining = asyncio.ensure_future(w.checkpointer.joined(S0))
        left = asyncio.ensure_future(w.checkpointer.joined(S0))
        await settle()
        assert len(w.checkpointer.names_in_flight()) == 1

        left.cancel()
        gate.set_result(Saved(1000, 5000))

        assert await joining == await saving
        assert w.log[0] == "save 0"
        assert w.checkpointer.names_in_flight() == set()

    async def test_there_is_nothing_to_join_where_no_save_runs(self) -> None:
        assert await world().checkpointer.joined(S0) is None


class TestUnderALease:
    async def test_it_is_seen_through_and_the_lease_given_back_when_the_asker_leaves(self) -> None:
        w = world()
        gate: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
        w.server.answer("save", gate)
        lease = w.desk.try_checkpoint(S0)
        assert lease is not None
        asking = asyncio.ensure_future(w.checkpointer.save_under(lease, Trigger.MANUAL))
        await settle()

        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (w.state(), w.desk.out) == ("saving", 1)
        gate.set_result(Saved(1000, 5000))
        await settle()

        assert (w.state(), w.table.view(S0).is_dirty, w.desk.out) == ("resident", False, 0)

    async def test_its_result_is_the_saves(self) -> None:
        w = world()
        lease = w.desk.try_checkpoint(S0)
        assert lease is not None

        result = await w.checkpointer.save_under(lease, Trigger.MANUAL)

        assert replace(result, detail="") == Checkpoint(O.PUBLISHED, 1000, 5000)
        assert lease.is_released


async def test_a_server_that_cannot_save_at_all_is_believed_and_does_not_open_the_breaker() -> None:
    w = world(ActionFailure(Fault.UNSUPPORTED, "not supported by multimodal", 501), max_failures=1)
    assert (await save(w)).outcome is O.OFF
    assert w.unable == ["not supported by multimodal"]
    assert w.actions.breaker_state is BreakerState.CLOSED
    assert (await save(w)).outcome is O.OFF
    assert w.log.count("save 0") == 1


class TestSharing:
    """Whether all slots share one memory, where nothing has shown it before the first save."""

    @pytest.mark.parametrize(("streams", "told"), [(1, [True]), (2, [False]), (0, [False]), (None, [])])
    async def test_the_first_file_shows_it(self, streams: int | None, told: list[bool]) -> None:
        w = world()
        w.files.streams = streams
        await save(w)
        assert w.shares == told

    async def test_it_is_not_asked_again_once_known_nor_where_there_is_one_slot(self) -> None:
        known = world()
        known.standing.set(shares_memory=False)
        single = world(slots=1)
        for w in (known, single):
            w.files.streams = 1
            await save(w)
            assert w.shares == []


async def test_the_first_file_shows_the_kind_of_memory_where_nothing_has() -> None:
    w = world()
    w.files.kind = MemoryKind.RECURRENT
    w.files.ids = "e" * 64
    await save(w)
    assert w.standing.facts.kind is MemoryKind.RECURRENT
    w.files.kind = MemoryKind.FULL
    w.house(0, stay(A, revision=2, saved=1))
    await save(w)
    assert w.standing.facts.kind is MemoryKind.RECURRENT


class TestAtRisk:
    """Whether leaving its slot would cost the session work that would be missed."""

    async def test_work_that_is_in_no_file_is(self) -> None:
        w = world(REFUSED)
        await save(w)
        assert w.checkpointer.is_at_risk(S0)
        assert not w.checkpointer.is_at_risk(SlotId(1)), "nobody lives there"

    async def test_work_that_may_not_be_kept_is(self) -> None:
        w = world()
        w.session(A, may_persist=False)
        assert w.checkpointer.is_at_risk(S0)

    async def test_saved_work_is_not(self) -> None:
        w = world()
        await save(w)
        assert not w.checkpointer.is_at_risk(S0)

    async def test_work_whose_file_is_being_published_is_not(self) -> None:
        w = world()
        result = await w.checkpointer.write(S0, w.table.epoch, Trigger.SWITCH)
        assert isinstance(result, asyncio.Task)
        assert w.table.view(S0).is_dirty
        assert not w.checkpointer.is_at_risk(S0)
        await result

    async def test_what_is_computed_again_in_a_moment_is_not(self) -> None:
        w = World(policy=CheckpointPolicy(min_tokens=256))
        w.house(0, stay(A, tokens=255))
        assert not w.checkpointer.is_at_risk(S0)

    async def test_one_of_many_single_questions_is_not(self) -> None:
        w = world()
        w.session(A, is_passing=True)
        assert not w.checkpointer.is_at_risk(S0)


class TestBugs:
    """What nobody foresaw is told, and leaves nothing behind that cannot be used any more."""

    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvproxy.checkpoint.shaper.CONFIRM_SECONDS", 0)

    async def test_a_save_that_dies_of_one_leaves_a_slot_that_nobody_lives_in(self) -> None:
        w = world()
        w.files.saved = bug

        with pytest.raises(ZeroDivisionError):
            await save(w)
        await settle()
        assert (w.state(), w.occupant()) == ("quarantined", None)
        w.clock.advance(QUIET_SECONDS + 0.1)
        await settle()

        assert (w.state(), w.changes) == ("idle", 1)

    async def test_one_under_a_lease_is_an_outcome_and_told(self) -> None:
        w = world()
        w.files.saved = bug
        lease = w.desk.try_checkpoint(S0)
        assert lease is not None

        result = await w.checkpointer.save_under(lease, Trigger.IDLE)

        assert result.outcome is O.STORE_FAILED
        assert (len(w.sink.of(TaskDied)), w.desk.out) == (1, 0)

    async def test_a_publication_that_dies_of_one_is_an_outcome_and_told(self) -> None:
        w = world()
        w.files.durable = bug

        assert (await save(w)).outcome is O.STORE_FAILED

        assert (w.state(), w.table.view(S0).is_dirty) == ("resident", True)
        assert [event.name for event in w.sink.of(TaskDied)] == ["publish a snapshot"]
        assert w.checkpointer.names_in_flight() == set()
        assert len(w.sink.of(CheckpointEnded)) == 1


def bug() -> object:
    return 1 // 0
