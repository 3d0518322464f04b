from __future__ import annotations

import asyncio

import pytest

from kvproxy.boundary.turn import Asked
from kvproxy.checkpoint.outcome import Restoration, RestoreOutcome
from kvproxy.checkpoint.restorer import DIED, MEMORY_IS_FULL
from kvproxy.identifiers import Revision, SlotId
from kvproxy.slots.slot import Stump
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.canary import Canary
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import FileIdentity, Generation, Manifest, Origin, digest_of_ids
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.names import new_name
from kvproxy.telemetry.events import RestoreEnded, RestoreStarted, TaskDied
from kvproxy.upstream.breaker import BreakerState
from kvproxy.upstream.facts import WindowFacts
from kvproxy.upstream.replies import ActionFailure, Erased, Fault, Restored
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
O = RestoreOutcome  # noqa: E741 - the outcomes, many times over
IDENTITY = FileIdentity(device=1, inode=2, size=3, mtime_ns=4, ctime_ns=5)


def world(answer: object = None, *, previous: Generation | None = None, **changes: object) -> World:
    """Session A is stored, slot 0 is nobody's."""
    made = World(**changes)  # type: ignore[arg-type]
    made.session(A)
    made.keep(manifest_of(A, generation_of(revision=Revision(4)), previous))
    if answer is not None:
        made.server.answer("restore", answer)
    return made


async def restore(world: World, base: int = 0) -> Restoration:
    result = await world.restorer.restore(S0, world.table.epoch, A, Revision(base))
    await settle()
    return result


def stored(world: World) -> Manifest:
    manifest = world.store.find(A, FINGERPRINT)
    assert manifest is not None
    return manifest


def name(world: World) -> str:
    return stored(world).current.name


class TestRestored:
    async def test_it_is_marked_restored_and_cleared_in_this_order(self) -> None:
        w = world()

        result = await restore(w)

        assert result == Restoration(O.RESTORED, 1000, 5000)
        assert w.log == ["mark", f"restore 0 {name(w)}", "clear"]
        assert (w.state(), w.occupant()) == ("resident", "a" * 12)
        assert w.store.touched == [A]

    async def test_what_was_restored_is_clean_and_holds_what_was_saved(self) -> None:
        w = world()
        await restore(w)

        occupancy = w.table.view(S0).occupancy
        assert occupancy is not None
        assert (occupancy.is_dirty, occupancy.tokens, occupancy.revision) == (False, 1000, 4)

    async def test_a_stay_never_begins_below_a_revision_the_session_has_reached(self) -> None:
        w = world()
        await restore(w, base=9)

        occupancy = w.table.view(S0).occupancy
        assert occupancy is not None
        assert (occupancy.revision, occupancy.is_dirty) == (9, False)

    async def test_it_is_told_when_it_begins_and_when_it_ends(self) -> None:
        w = world()
        await restore(w)

        assert len(w.sink.of(RestoreStarted)) == 1
        (ended,) = w.sink.of(RestoreEnded)
        assert (ended.session, ended.outcome, ended.tokens) == ("a" * 12, O.RESTORED, 1000)


class TestNotTried:
    async def test_a_session_never_saved_costs_no_look_at_any_file(self) -> None:
        w = World()
        assert (await restore(w)).outcome is O.NO_SNAPSHOT
        assert (w.log, w.sink.events) == ([], [])

    async def test_a_snapshot_of_another_model_is_not_touched_and_the_difference_named(self) -> None:
        w = World()
        other = Fingerprint.from_dict({"model_path": "/models/one.gguf", "build": "b2"})
        w.keep(manifest_of(A, fingerprint=other))

        result = await restore(w)

        assert (result.outcome, result.detail) == (O.FINGERPRINT_MISMATCH, "differs in build")
        assert w.log == []

    async def test_nothing_is_restored_where_persistence_is_off(self) -> None:
        w = world()
        w.turn_off("no save path")
        result = await restore(w)
        assert (result.outcome, result.detail, w.log) == (O.OFF, "no save path", [])

    async def test_nothing_is_restored_where_the_operator_wants_none(self) -> None:
        assert (await restore(world(restores=False))).outcome is O.DISABLED

    async def test_a_snapshot_that_does_not_fit_the_slot_is_kept(self) -> None:
        w = World()
        kept = w.keep(manifest_of(A, generation_of(tokens=4097)))

        result = await restore(w)

        assert (result.outcome, result.detail) == (O.DOES_NOT_FIT, "4097 tokens do not fit 4096")
        assert stored(w) == kept
        assert w.log == []

    async def test_without_the_mark_the_server_is_not_asked(self) -> None:
        w = world(max_failures=1)
        w.store.mark_fails = True

        result = await restore(w)

        assert (result.outcome, result.detail) == (O.STORE_FAILED, "the disk is full")
        assert w.log == ["mark", "clear"]
        assert w.state() == "idle"
        assert w.actions.breaker_state is BreakerState.CLOSED

    async def test_a_life_that_has_passed_is_not_restored_into(self) -> None:
        w = world()
        epoch = w.table.epoch
        w.live(1)

        result = await w.restorer.restore(S0, epoch, A, Revision(0))

        assert (result.outcome, w.log) == (O.UNREACHABLE, [])

    async def test_an_open_breaker_spares_the_call_and_the_mark_does_not_stay(self) -> None:
        w = world(ActionFailure(Fault.FAILED, "no"), max_failures=1)
        await restore(w)
        w.log.clear()

        assert (await restore(w)).outcome is O.BREAKER_OPEN
        assert w.log == ["mark", "clear"]
        assert (w.state(), w.store.marks) == ("idle", set())

    async def test_a_restore_that_never_got_its_turn_is_busy_and_blames_nothing(self) -> None:
        w = World(timeout_seconds=0.0)
        kept = w.keep(manifest_of(A, generation_of(size_bytes=1)))
        w.server.answer("erase", Late())
        await w.actions.run(lambda: w.server.start_erase(SlotId(1)), w.table.epoch, 1.0, lambda fate: None)

        assert (await restore(w)).outcome is O.BUSY
        assert (w.state(), stored(w), w.store.marks) == ("idle", kept, set())

    async def test_nothing_is_restored_into_the_slot_of_a_process_that_came_meanwhile(self) -> None:
        w = world()
        kept = stored(w)
        w.store.while_marking = lambda: w.table.begin_epoch(2)

        assert (await restore(w)).outcome is O.UNREACHABLE

        assert w.log == ["mark", "clear"]
        assert (stored(w), w.store.marks) == (kept, set())


class TestVerified:
    async def test_a_file_that_is_not_what_was_published_never_reaches_the_server(self) -> None:
        w = world()
        w.files.bad[stored(w).current.name] = "is 1 byte short"

        result = await restore(w)

        assert result.outcome is O.SNAPSHOT_INVALID
        assert stored(w).current.invalid_reason == "is 1 byte short"
        assert w.log == ["invalidate"]

    async def test_the_previous_generation_stands_in_for_one_that_is_bad(self) -> None:
        previous = generation_of(tokens=700, revision=Revision(3))
        w = world(Restored(700, 3500), previous=previous)
        w.files.bad[stored(w).current.name] = "is gone"

        result = await restore(w)

        assert (result.outcome, result.tokens) == (O.RESTORED, 700)
        assert w.log == ["invalidate", "mark", f"restore 0 {previous.name}", "clear"]

    async def test_when_both_are_bad_nothing_is_asked_of_the_server(self) -> None:
        previous = generation_of()
        w = world(previous=previous)
        w.files.bad |= {stored(w).current.name: "is gone", previous.name: "is gone"}

        assert (await restore(w)).outcome is O.SNAPSHOT_INVALID
        assert w.log == ["invalidate", "invalidate"]
        assert (await restore(w)).outcome is O.SNAPSHOT_INVALID

    async def test_a_directory_that_is_not_there_is_told_and_condemns_no_snapshot(self) -> None:
        w = world()
        w.files.absence = "/slots: No such file or directory"

        result = await restore(w)

        assert (result.outcome, result.detail) == (O.STORE_FAILED, w.files.absence)
        assert stored(w).current.is_valid
        assert w.log == []
        assert [event.outcome for event in w.sink.of(RestoreEnded)] == [O.STORE_FAILED]

    async def test_a_file_that_moved_and_is_still_right_is_known_by_its_new_identity(self) -> None:
        w = world()
        w.files.seen = IDENTITY

        await restore(w)

        assert stored(w).current.identity == IDENTITY

    async def test_verification_can_be_switched_off(self) -> None:
        w = world(verify=False)
        w.files.bad[stored(w).current.name] = "is 1 byte short"
        assert (await restore(w)).outcome is O.RESTORED


class TestFailedUnchecked:
    """With `restore.verify` off nothing was looked at before; what is blamed is what a look shows then."""

    @pytest.mark.parametrize("answer", ["refused", "implausible"])
    async def test_a_file_that_is_not_what_was_published_is_named_so(self, answer: str) -> None:
        w = self.world(answer)
        w.files.bad[name(w)] = "file is 1 bytes instead of 5000"
        await restore(w)
        assert stored(w).current.invalid_reason == "file is 1 bytes instead of 5000"

    async def test_a_damaged_file_is_not_taken_for_want_of_room(self) -> None:
        w = self.world("refused", MEMORY_IS_FULL)
        w.house(1, stay(B))
        w.files.bad[name(w)] = "file is missing"
        assert (await restore(w)).outcome is O.REFUSED
        assert stored(w).current.invalid_reason == "file is missing"

    @pytest.mark.parametrize(
        ("answer", "outcome"), [("refused", O.STORE_FAILED), ("implausible", O.IMPLAUSIBLE)]
    )
    async def test_a_directory_that_is_not_there_condemns_no_snapshot(self, answer: str, outcome: O) -> None:
        w = self.world(answer)
        w.files.absence = "/slots: No such file or directory"
        assert (await restore(w)).outcome is outcome
        assert stored(w).current.is_valid

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [("refused", "the server refused it: no"), ("implausible", "the server restored 999 tokens of 1000")],
    )
    async def test_of_a_file_that_nothing_is_wrong_with_the_servers_word_counts(
        self, answer: str, reason: str
    ) -> None:
        w = self.world(answer)
        await restore(w)
        assert stored(w).current.invalid_reason == reason

    def world(self, answer: str, words: str = "no") -> World:
        refusal = ActionFailure(Fault.REFUSED, words, 400)
        return world(refusal if answer == "refused" else Restored(999, 5000), verify=False)


class TestFailed:
    async def test_a_snapshot_the_server_refuses_is_invalid_and_the_server_not_to_blame(self) -> None:
        w = world(ActionFailure(Fault.REFUSED, "Unable to restore slot", 400), max_failures=1)

        result = await restore(w)

        assert result.outcome is O.REFUSED
        assert stored(w).current.invalid_reason == "the server refused it: Unable to restore slot"
        assert (w.state(), w.table.view(S0).is_blank) == ("idle", True)
        assert w.actions.breaker_state is BreakerState.CLOSED
        assert w.store.marks == set()

    async def test_a_server_without_room_does_not_make_the_snapshot_invalid(self) -> None:
        w = world(ActionFailure(Fault.REFUSED, f"Unable to restore slot: {MEMORY_IS_FULL}", 400))
        w.house(1, stay(B))

        assert (await restore(w)).outcome is O.MEMORY_FULL
        assert stored(w).current.is_valid
        assert w.actions.breaker_state is BreakerState.CLOSED

    async def test_where_no_other_slot_takes_room_the_same_words_mean_the_snapshot(self) -> None:
        w = world(ActionFailure(Fault.REFUSED, f"Unable to restore slot: {MEMORY_IS_FULL}", 400))

        assert (await restore(w)).outcome is O.REFUSED
        assert not stored(w).current.is_valid

    @pytest.mark.parametrize(("shares", "streams", "then"), [(True, 2, "without"), (False, 1, "with")])
    async def test_a_file_of_another_division_of_the_memory_is_not_blamed_nor_tried_again(
        self, shares: bool, streams: int, then: str
    ) -> None:
        w = world(ActionFailure(Fault.REFUSED, f"Unable to restore slot: {MEMORY_IS_FULL}", 400))
        w.standing.set(shares_memory=shares)
        w.files.streams = streams
        w.house(1, stay(B))  # nobody is sent away for it

        result = await restore(w)

        assert result.outcome is O.FINGERPRINT_MISMATCH
        assert result.detail.startswith(f"differs in --kv-unified: the server was started {then} it then")
        assert stored(w).current.is_valid
        assert (await restore(w)).outcome is O.FINGERPRINT_MISMATCH
        assert w.log.count(f"restore 0 {name(w)}") == 1

    async def test_an_older_file_of_the_same_division_is_restored_in_its_place(self) -> None:
        older = generation_of(revision=Revision(2))
        w = world(previous=older)
        refusal = ActionFailure(Fault.REFUSED, f"Unable to restore slot: {MEMORY_IS_FULL}", 400)
        w.server.answer("restore", refusal, Restored(1000, 5000))
        w.standing.set(shares_memory=False)
        w.files.streams = 1

        assert (await restore(w)).outcome is O.RESTORED
        assert [entry for entry in w.log if entry.startswith("restore")] == [
            f"restore 0 {name(w)}",
            f"restore 0 {older.name}",
        ]

    async def test_a_new_life_of_the_server_is_given_what_the_one_before_did_not_take(self) -> None:
        w = world(ActionFailure(Fault.REFUSED, f"Unable to restore slot: {MEMORY_IS_FULL}", 400))
        w.standing.set(shares_memory=True)
        w.files.streams = 2
        await restore(w)
        w.server.answer("restore", Restored(1000, 5000))
        w.live()

        assert (await restore(w)).outcome is O.RESTORED

    async def test_a_file_of_the_same_division_is_blamed_as_ever(self) -> None:
        w = world(ActionFailure(Fault.REFUSED, f"Unable to restore slot: {MEMORY_IS_FULL}", 400))
        w.standing.set(shares_memory=True)
        w.files.streams = 1

        assert (await restore(w)).outcome is O.REFUSED
        assert not stored(w).current.is_valid

    async def test_a_server_that_fails_counts_against_the_breaker_and_keeps_the_snapshot(self) -> None:
        w = world(ActionFailure(Fault.FAILED, "HTTP 500", 500), max_failures=1)

        assert (await restore(w)).outcome is O.FAILED
        assert stored(w).current.is_valid
        assert w.actions.breaker_state is BreakerState.OPEN

    async def test_a_server_that_wants_a_key_says_nothing_about_restoring(self) -> None:
        w = world(ActionFailure(Fault.UNAUTHORIZED, "Invalid API Key", 401), max_failures=1)

        assert (await restore(w)).outcome is O.REFUSED
        assert stored(w).current.is_valid
        assert w.actions.breaker_state is BreakerState.CLOSED

    async def test_a_count_that_differs_from_the_saved_one_makes_the_snapshot_invalid(self) -> None:
        w = world(Restored(999, 5000))

        result = await restore(w)

        assert (result.outcome, result.detail) == (
            O.IMPLAUSIBLE,
            "the server restored 999 tokens of 1000",
        )
        assert not stored(w).current.is_valid
        assert (w.state(), w.occupant(), w.table.view(S0).is_blank) == ("idle", None, False)

    async def test_a_server_that_dies_of_a_snapshot_never_sees_it_again(self) -> None:
        w = world(ActionFailure(Fault.UNREACHABLE, "connection reset"), max_failures=1)

        assert (await restore(w)).outcome is O.UNREACHABLE
        assert stored(w).current.invalid_reason == DIED
        assert w.log[-2:] == ["invalidate", "clear"]
        assert w.actions.breaker_state is BreakerState.CLOSED

    @pytest.mark.parametrize(
        "failure",
        [
            ActionFailure(Fault.UNREACHABLE, "connection refused", was_sent=False),
            ActionFailure(Fault.UNREACHABLE, "Loading model", 503),
        ],
    )
    async def test_a_server_that_cannot_have_acted_does_not_poison_the_snapshot(
        self, failure: ActionFailure
    ) -> None:
        w = world(failure)

        assert (await restore(w)).outcome is O.UNREACHABLE
        assert stored(w).current.is_valid
        assert (w.state(), w.store.marks) == ("idle", set())

    async def test_a_restore_into_a_life_that_passed_meanwhile_makes_nobody_resident(self) -> None:
        w = world()

        def pass_away() -> Restored:
            w.live(2)
            w.house(0, stay(B))
            return Restored(1000, 5000)

        w.server.answer("restore", pass_away)

        assert (await restore(w)).outcome is O.UNREACHABLE
        assert w.occupant() == "b" * 12
        assert stored(w).current.is_valid
        assert w.store.marks == set()


class TestLate:
    async def test_a_restore_past_its_deadline_leaves_a_slot_of_which_nothing_is_believed(self) -> None:
        w = world(Late(), max_failures=1)

        assert (await restore(w)).outcome is O.TIMED_OUT
        assert (w.state(), w.occupant()) == ("quarantined", None)
        assert stored(w).current.is_valid
        assert w.actions.breaker_state is BreakerState.OPEN

    async def test_its_mark_stays_until_its_fate_is_known(self) -> None:
        late = Late()
        w = world(late)
        await restore(w)
        assert w.store.marks == {name(w)}

        late.end(Restored(1000, 5000))
        await settle()

        assert (w.store.marks, w.state(), w.changes) == (set(), "idle", 1)
        assert w.occupant() is None, "a late restore is nobody's"
        assert w.sink.of(TaskDied) == []

    async def test_a_server_that_dies_of_it_later_never_sees_it_again(self) -> None:
        late = Late()
        w = world(late)
        await restore(w)

        late.end(ActionFailure(Fault.UNREACHABLE, "connection reset"))
        await settle()

        assert stored(w).current.invalid_reason == DIED
        assert w.store.marks == set()


class TestDraftModel:
    async def test_the_slot_is_erased_before_the_mark_is_made(self) -> None:
        w = world()
        w.table.speculates = True
        assert (await restore(w)).outcome is O.RESTORED
        assert w.log == ["erase 0", "mark", f"restore 0 {name(w)}", "clear"]

    async def test_without_the_erase_there_is_no_restore(self) -> None:
        w = world()
        w.table.speculates = True
        w.server.answer("erase", ActionFailure(Fault.FAILED, "HTTP 500", 500))
        assert (await restore(w)).outcome is O.FAILED
        assert w.log == ["erase 0"]
        assert w.state() == "idle"
        assert stored(w).current.is_valid

    async def test_a_late_erase_is_waited_for_like_any_late_action(self) -> None:
        w = world()
        w.table.speculates = True
        late = Late()
        w.server.answer("erase", late)
        assert (await restore(w)).outcome is O.FAILED
        assert w.state() == "quarantined"
        late.end(Erased(1))
        await settle()
        assert (w.state(), w.changes) == ("idle", 1)
        assert stored(w).current.is_valid


async def test_a_server_that_cannot_restore_at_all_is_believed_and_does_not_open_the_breaker() -> None:
    w = world(ActionFailure(Fault.UNSUPPORTED, "not supported by multimodal", 501), max_failures=1)
    assert (await restore(w)).outcome is O.OFF
    assert w.unable == ["not supported by multimodal"]
    assert w.actions.breaker_state is BreakerState.CLOSED
    assert stored(w).current.is_valid
    assert w.state() == "idle"


class TestAnotherBuild:
    """The snapshot is another build's, and the canary says that it computes the same."""

    OLD = Fingerprint.from_dict({"model_path": "/models/one.gguf", "build": "b1", "canary": "c"})
    NEW = Fingerprint.from_dict({"model_path": "/models/one.gguf", "build": "b2", "canary": "c"})

    async def world(self, answer: object = None) -> World:
        w = World()
        w.session(A)
        w.canaries._canaries["c"] = Canary.of([(1, -0.5)])
        w.keep(manifest_of(A, fingerprint=self.OLD))
        w.standing.set(fingerprint=self.NEW)
        if answer is not None:
            w.server.answer("restore", answer)
        return w

    async def test_it_is_restored_and_counts_as_used(self) -> None:
        w = await self.world()
        assert (await restore(w)).outcome is O.RESTORED
        assert w.store.touched == [A]

    async def test_a_format_that_the_server_does_not_know_is_no_fault_of_the_file(self) -> None:
        w = await self.world(ActionFailure(Fault.REFUSED, "Unable to restore slot", 400))
        assert (await restore(w)).outcome is O.REFUSED
        kept = w.store.find(A, self.OLD)
        assert kept is not None
        assert kept.current.is_valid

        w.log.clear()
        assert (await restore(w)).outcome is O.FINGERPRINT_MISMATCH
        assert w.log == [], "it is not tried again"

    async def test_one_that_kills_the_server_is_never_tried_again(self) -> None:
        w = await self.world(ActionFailure(Fault.UNREACHABLE, "connection reset"))
        await restore(w)
        kept = w.store.find(A, self.OLD)
        assert kept is not None
        assert kept.current.invalid_reason == DIED


async def test_a_mismatch_is_told_with_the_fields_that_differ() -> None:
    w = world()
    w.standing.set(fingerprint=Fingerprint.from_dict({"model_path": "/models/two.gguf", "build": "b11434"}))
    assert (await restore(w)).outcome is O.FINGERPRINT_MISMATCH
    (ended,) = w.sink.of(RestoreEnded)
    assert (ended.outcome, ended.detail) == (O.FINGERPRINT_MISMATCH, "differs in model_path")
    assert w.sink.of(RestoreStarted) == []


class TestExtended:
    """Memory that cannot roll back goes on from a snapshot only if the prompt extends all of it."""

    ASKED = Asked("chat/completions", {"messages": [{"role": "user", "content": "the same beginning"}]})
    IDS = tuple(b"<user>the same beginning<assistant>")

    def stored(self, ids: tuple[int, ...] | None, kind: MemoryKind) -> World:
        w = world()
        w.standing.set(kind=kind)
        digest = None if ids is None else digest_of_ids(ids)
        tokens = 10 if ids is None else len(ids)
        w.keep(manifest_of(A, generation_of(tokens=tokens, ids_digest=digest, form="boundary")))
        w.server.answer("restore", Restored(tokens, 5000))
        return w

    async def run(self, w: World, asked: Asked | None = ASKED) -> RestoreOutcome:
        result = await w.restorer.restore(S0, w.table.epoch, A, Revision(0), asked)
        return result.outcome

    @pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.RECURRENT, MemoryKind.SLIDING_WINDOW])
    async def test_a_prompt_that_extends_it_is_restored_for(self, kind: MemoryKind) -> None:
        w = self.stored(self.IDS[:-1], kind)
        assert await self.run(w) is O.RESTORED
        view = w.table.view(S0)
        assert view.occupancy is not None
        assert view.occupancy.is_boundary

    @pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.RECURRENT, MemoryKind.SLIDING_WINDOW])
    @pytest.mark.parametrize("ids", [IDS, (*IDS[:-2], 0), (*IDS, 1)])
    async def test_one_that_does_not_is_cold(self, kind: MemoryKind, ids: tuple[int, ...]) -> None:
        w = self.stored(ids, kind)
        assert await self.run(w) is O.NOT_EXTENDED
        assert not any(line.startswith("restore") for line in w.log)
        assert stored(w).current.is_valid

    async def test_full_attention_is_restored_whatever_is_asked(self) -> None:
        w = self.stored((*self.IDS, 1), MemoryKind.FULL)
        assert await self.run(w) is O.RESTORED
        assert "render" not in w.log

    async def test_what_is_not_known_is_tried_but_never_with_a_sliding_window(self) -> None:
        assert await self.run(self.stored(None, MemoryKind.HYBRID)) is O.RESTORED
        assert await self.run(self.stored(None, MemoryKind.SLIDING_WINDOW)) is O.NOT_EXTENDED
        assert await self.run(self.stored(self.IDS[:-1], MemoryKind.SLIDING_WINDOW), None) is O.NOT_EXTENDED

    @pytest.mark.parametrize("kind", MemoryKind)
    async def test_of_a_sliding_window_only_the_end_is_there(self, kind: MemoryKind) -> None:
        w = self.stored(self.IDS[:-1], kind)
        assert await self.run(w) is O.RESTORED
        occupancy = w.table.view(S0).occupancy
        assert occupancy is not None
        stump = Stump(len(self.IDS) - 1, digest_of_ids(self.IDS[:-1]))
        assert occupancy.stump == (stump if kind is MemoryKind.SLIDING_WINDOW else None)


class TestWindow:
    """A sliding window that has to be opened, at a server that was seen to reuse none as it is."""

    ORIGIN = Origin(alteration=Alteration.WINDOW_EDIT, name=new_name(OWNER))

    def world(self, current: Generation, previous: Generation | None = None) -> World:
        w = world()
        w.keep(manifest_of(A, current, previous))
        w.standing.set(kind=MemoryKind.SLIDING_WINDOW, window=WindowFacts(64, is_whole=False))
        return w

    def generation(self, **changes: object) -> Generation:
        ids = TestExtended.IDS[:-1]
        return generation_of(tokens=len(ids), ids_digest=digest_of_ids(ids), **changes)

    async def restore(self, w: World) -> Restoration:
        w.server.answer("restore", Restored(len(TestExtended.IDS) - 1, 5000))
        return await w.restorer.restore(S0, w.table.epoch, A, Revision(0), TestExtended.ASKED)

    async def test_one_that_is_open_is_restored(self) -> None:
        w = self.world(self.generation(origin=self.ORIGIN))
        assert (await self.restore(w)).outcome is O.RESTORED
        occupancy = w.table.view(S0).occupancy
        assert occupancy is not None
        assert occupancy.stump is None, "the server goes back to nothing before its end"

    async def test_at_a_server_that_may_keep_it_in_full_only_its_end_is_there_all_the_same(self) -> None:
        """Nobody has tried whether the server would refuse to go back behind it."""
        w = self.world(self.generation(origin=self.ORIGIN))
        w.standing.set(window=WindowFacts(64, is_whole=None))
        assert (await self.restore(w)).outcome is O.RESTORED
        occupancy = w.table.view(S0).occupancy
        assert occupancy is not None
        assert occupancy.stump is not None

    async def test_one_that_is_shut_is_left_alone_and_stays_valid(self) -> None:
        w = self.world(self.generation())
        assert (await self.restore(w)).outcome is O.WINDOW_SHUT
        assert stored(w).current.is_valid
        assert w.log == []

    async def test_behind_one_that_is_shut_an_older_open_one_is_found(self) -> None:
        older = self.generation(origin=self.ORIGIN)
        w = self.world(self.generation(), older)
        assert (await self.restore(w)).outcome is O.RESTORED
        assert f"restore 0 {older.name}" in w.log

    async def test_another_builds_is_not_restored(self) -> None:
        """Though a snapshot as the server wrote it would be."""
        w = self.world(self.generation(origin=self.ORIGIN))
        await w.canaries.remember(Canary.of([(1, -0.5)]), None, "")
        name = w.canaries.name(Canary.of([(1, -0.5)]))
        saved, present = (
            Fingerprint.from_dict({"model_path": "/m", "build": build, "canary": name}) for build in "ab"
        )
        w.standing.set(fingerprint=present)
        w.store.index.remove(stored(w))
        w.keep(manifest_of(A, self.generation(origin=self.ORIGIN), fingerprint=saved))
        assert (await self.restore(w)).outcome is O.WINDOW_SHUT
        w.standing.set(window=WindowFacts(is_whole=True))
        w.keep(manifest_of(A, self.generation(), fingerprint=saved))
        assert (await self.restore(w)).outcome is O.RESTORED


async def test_a_restore_that_dies_of_a_bug_leaves_a_slot_that_can_be_used() -> None:
    def bug() -> object:
        raise ValueError("a bug")

    w = world(bug)

    with pytest.raises(ValueError, match="a bug"):
        await restore(w)

    assert (w.state(), w.occupant(), w.table.view(S0).is_blank) == ("idle", None, False)


async def test_what_is_about_to_be_restored_counts_as_used_before_anything_is_asked() -> None:
    """The one not used for longest is what retention lets go of, and another is being saved meanwhile."""
    w = world()
    w.standing.set(kind=MemoryKind.HYBRID)
    w.keep(manifest_of(A, generation_of(ids_digest="e" * 64)))
    rendered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    w.server.answer("render", rendered)
    asked = Asked("chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
    restoring = asyncio.ensure_future(w.restorer.restore(S0, w.table.epoch, A, Revision(0), asked))
    await settle()

    assert w.store.touched == [A]

    rendered.set_result("hello")
    await restoring
