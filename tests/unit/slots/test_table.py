from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvproxy.errors import InvariantError
from kvproxy.identifiers import Epoch, Revision, SessionKey, SlotId
from kvproxy.slots.settling import Settling
from kvproxy.slots.slot import Occupancy
from kvproxy.slots.state import TRANSITIONS, SlotEvent, SlotState
from kvproxy.slots.table import SlotTable
from kvproxy.upstream.replies import SlotInfo
from tests.support.clock import FakeClock
from tests.support.fakes_core import A, B, idle, processing, stay

S0, S1 = SlotId(0), SlotId(1)
SEEN_RUNNING = Settling(S0, was_seen=True)


class Room:
    """A table of two slots that were seen idle."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.table = SlotTable(self.clock)
        self.epoch = self.table.begin_epoch(2)
        self.table.seen([idle(0), idle(1)])

    def state(self, slot: SlotId = S0) -> SlotState:
        return self.table.view(slot).state

    def house(self, occupancy: Occupancy, slot: SlotId = S0) -> None:
        self.table.serve(slot, self.epoch, occupancy)
        self.table.served(slot, self.epoch, occupancy)


@pytest.fixture
def room() -> Room:
    return Room()


class TestLives:
    def test_before_the_first_life_there_are_no_slots(self) -> None:
        table = SlotTable(FakeClock())
        assert (table.views(), table.epoch, table.unsettled) == ((), 0, 0)

    def test_a_new_life_knows_nothing_of_its_slots(self, room: Room) -> None:
        room.house(stay(A))

        assert room.table.begin_epoch(3) == 2

        assert [view.state for view in room.table.views()] == [SlotState.UNKNOWN] * 3
        assert room.table.slot_of(A) is None
        assert room.table.unsettled == 3

    def test_a_slot_that_never_ran_a_task_or_holds_no_tokens_is_blank_when_seen_idle(self) -> None:
        table = SlotTable(FakeClock())
        table.begin_epoch(3)

        table.seen([idle(0), idle(1, tokens=0), idle(2, tokens=7)])

        assert [view.is_blank for view in table.views()] == [True, True, False]

    def test_a_slot_that_still_runs_something_of_before_stays_unknown(self) -> None:
        table = SlotTable(FakeClock())
        table.begin_epoch(2)

        assert table.seen([processing(0), idle(1)])
        assert [view.state for view in table.views()] == [SlotState.UNKNOWN, SlotState.IDLE]
        assert not table.seen([processing(0), idle(1)])

    def test_a_look_at_slots_we_do_not_know_changes_nothing(self, room: Room) -> None:
        assert not room.table.seen([idle(7)])

    def test_the_slots_of_a_server_that_slept_are_blank(self) -> None:
        table = SlotTable(FakeClock())
        table.begin_epoch(2)

        table.assume_blank()

        assert [(v.state, v.is_blank) for v in table.views()] == [(SlotState.IDLE, True)] * 2

    def test_a_look_that_came_before_the_news_of_a_sleep_does_no_harm(self, room: Room) -> None:
        room.table.begin_epoch(2)
        room.table.seen([idle(0, tokens=5)])

        room.table.assume_blank()

        assert [view.state for view in room.table.views()] == [SlotState.IDLE] * 2


CALLS: dict[str, Callable[[SlotTable, Epoch], bool]] = {
    "serve": lambda t, e: t.serve(S0, e, stay(A)),
    "take": lambda t, e: t.take(S0, e),
    "served": lambda t, e: t.served(S0, e, None),
    "broke_off": lambda t, e: t.broke_off(S0, e, SEEN_RUNNING),
    "lose": lambda t, e: t.lose(S0, e),
    "start_saving": lambda t, e: t.start_saving(S0, e),
    "save_ended": lambda t, e: t.save_ended(S0, e),
    "start_restoring": lambda t, e: t.start_restoring(S0, e),
    "restored": lambda t, e: t.restored(S0, e, stay(A)),
    "not_restored": lambda t, e: t.not_restored(S0, e, is_blank=False),
    "doubt": lambda t, e: t.doubt(S0, e),
}
EVENTS = {
    "serve": SlotEvent.SERVE,
    "broke_off": SlotEvent.BROKEN_OFF,
    "lose": SlotEvent.LOST,
    "start_saving": SlotEvent.SAVE,
    "save_ended": SlotEvent.SAVE_ENDED,
    "start_restoring": SlotEvent.RESTORE,
    "restored": SlotEvent.RESTORED,
    "not_restored": SlotEvent.NOT_RESTORED,
    "doubt": SlotEvent.DOUBTED,
}
PATHS: dict[SlotState, tuple[str, ...]] = {
    SlotState.UNKNOWN: (),
    SlotState.IDLE: ("look",),
    SlotState.RESTORING: ("look", "start_restoring"),
    SlotState.RESIDENT: ("look", "start_restoring", "restored"),
    SlotState.SERVING: ("look", "serve"),
    SlotState.CANCELLING: ("look", "serve", "broke_off"),
    SlotState.SAVING: ("look", "start_restoring", "restored", "start_saving"),
    SlotState.QUARANTINED: ("look", "doubt"),
}


def table_in(state: SlotState) -> SlotTable:
    table = SlotTable(FakeClock())
    epoch = table.begin_epoch(1)
    for step in PATHS[state]:
        if step == "look":
            table.seen([idle(0, tokens=3)])
        else:
            CALLS[step](table, epoch)
    assert table.view(S0).state is state
    return table


class TestLegality:
    @pytest.mark.parametrize("name", EVENTS)
    @pytest.mark.parametrize("state", SlotState)
    def test_a_move_is_made_as_the_table_says_or_raises_and_changes_nothing(
        self, state: SlotState, name: str
    ) -> None:
        table = table_in(state)
        before = table.view(S0)
        after = TRANSITIONS[state].get(EVENTS[name])

        if after is None:
            with pytest.raises(InvariantError):
                CALLS[name](table, table.epoch)
            assert table.view(S0) == before
            assert table.last_switch is None
        else:
            assert CALLS[name](table, table.epoch)
            assert table.view(S0).state is after

    @pytest.mark.parametrize("name", CALLS)
    @pytest.mark.parametrize("state", SlotState)
    def test_what_is_learned_of_a_life_that_has_passed_changes_nothing(
        self, state: SlotState, name: str
    ) -> None:
        table = table_in(state)
        before = table.views()

        assert CALLS[name](table, Epoch(table.epoch - 1)) is False
        assert table.views() == before

    def test_of_a_passed_life_also_slots_that_are_no_more_may_be_spoken_of(self, room: Room) -> None:
        passed = room.epoch
        room.table.begin_epoch(1)

        assert not room.table.served(S1, passed, None)
        assert not room.table.fate_known(S1, passed)


class TestRequests:
    def test_an_answer_makes_its_session_resident_and_dates_the_slot(self, room: Room) -> None:
        room.table.serve(S0, room.epoch, stay(A))
        room.clock.advance(7)
        room.table.served(S0, room.epoch, stay(A, revision=2))

        view = room.table.view(S0)
        assert (view.state, view.occupant, view.last_used) == (SlotState.RESIDENT, A, 1007.0)
        assert room.table.slot_of(A) == view

    def test_an_answer_that_was_nobodys_leaves_an_idle_slot_that_is_not_blank(self, room: Room) -> None:
        room.table.serve(S0, room.epoch, None)
        room.table.served(S0, room.epoch, None)

        view = room.table.view(S0)
        assert (view.state, view.occupant, view.is_blank) == (SlotState.IDLE, None, False)

    def test_an_unpinned_request_ends_the_stay_of_whoever_lived_where_it_was_seen(self, room: Room) -> None:
        room.house(stay(A))

        assert room.table.take(S0, room.epoch)

        assert (room.state(), room.table.slot_of(A)) == (SlotState.SERVING, None)

    def test_a_dropped_request_keeps_its_occupant_with_an_unknown_count_once_seen_idle(
        self, room: Room
    ) -> None:
        room.table.serve(S0, room.epoch, stay(A, revision=3, saved=3))
        room.table.broke_off(S0, room.epoch, SEEN_RUNNING)
        assert room.table.unsettled == 1
        assert not room.table.seen([processing(0), idle(1)])

        assert room.table.seen([idle(0), idle(1)])

        kept = room.table.view(S0).occupancy
        assert kept is not None
        assert (kept.revision, kept.tokens, kept.is_dirty) == (4, None, True)
        assert room.state() is SlotState.RESIDENT

    def test_a_dropped_request_of_nobody_leaves_an_idle_slot(self, room: Room) -> None:
        room.table.serve(S0, room.epoch, None)
        room.table.broke_off(S0, room.epoch, SEEN_RUNNING)
        room.table.seen([idle(0)])

        assert (room.state(), room.table.unsettled) == (SlotState.IDLE, 0)

    def test_dirty_work_is_told_as_long_as_any_is_unsaved(self, room: Room) -> None:
        assert not room.table.has_dirty
        room.house(stay(A, revision=2, saved=1))
        assert room.table.has_dirty


class TestActions:
    def test_a_published_save_leaves_the_occupant_clean(self, room: Room) -> None:
        room.house(stay(A, revision=2, saved=1))
        room.table.start_saving(S0, room.epoch)
        room.table.save_ended(S0, room.epoch)
        assert room.table.view(S0).is_dirty
        assert room.table.checkpointed(S0, room.epoch, A, Revision(2))

        assert (room.state(), room.table.view(S0).is_dirty) == (SlotState.RESIDENT, False)

    def test_a_failed_save_leaves_the_occupant_as_it_was(self, room: Room) -> None:
        room.house(stay(A, revision=2, saved=1))
        before = room.table.view(S0)
        room.table.start_saving(S0, room.epoch)
        room.table.save_ended(S0, room.epoch)

        assert room.table.view(S0) == before

    def test_a_save_of_one_who_has_left_marks_nobody_else(self, room: Room) -> None:
        room.house(stay(A, revision=2, saved=1))
        before = room.table.view(S0)

        assert not room.table.checkpointed(S0, room.epoch, B, Revision(2))
        assert not room.table.checkpointed(S0, Epoch(room.epoch - 1), A, Revision(2))
        assert room.table.view(S0) == before

    def test_a_restore_makes_its_session_resident_and_a_failed_one_nobody(self, room: Room) -> None:
        room.table.start_restoring(S0, room.epoch)
        room.table.restored(S0, room.epoch, stay(A, saved=1))
        room.table.start_restoring(S1, room.epoch)
        room.table.not_restored(S1, room.epoch, is_blank=True)

        assert room.table.slot_of(A) == room.table.view(S0)
        assert (room.state(S1), room.table.view(S1).is_blank) == (SlotState.IDLE, True)

    def test_a_loss_is_a_switch_only_where_somebody_lived(self, room: Room) -> None:
        room.table.lose(S0, room.epoch, is_blank=True)
        assert room.table.last_switch is None

        room.house(stay(A))
        room.clock.advance(5)
        room.table.lose(S0, room.epoch)
        assert room.table.last_switch == 1005.0
        assert not room.table.view(S0).is_blank


class TestDoubt:
    def test_nothing_is_believed_of_a_slot_whose_action_is_late(self, room: Room) -> None:
        room.house(stay(A))
        room.table.start_saving(S0, room.epoch)
        room.table.doubt(S0, room.epoch)

        view = room.table.view(S0)
        assert (view.state, view.occupant, view.is_free) == (SlotState.QUARANTINED, None, False)

    def test_it_is_idle_again_once_the_fate_is_known(self, room: Room) -> None:
        room.table.doubt(S0, room.epoch)
        room.table.fate_known(S0, room.epoch)

        assert (room.state(), room.table.view(S0).is_blank) == (SlotState.IDLE, False)

    def test_what_is_served_while_the_fate_is_open_is_not_kept(self, room: Room) -> None:
        room.table.doubt(S0, room.epoch)
        room.house(stay(B))
        assert (room.state(), room.table.slot_of(B)) == (SlotState.QUARANTINED, None)

        room.table.fate_known(S0, room.epoch)
        assert room.state() is SlotState.IDLE

    def test_what_is_served_while_the_fate_becomes_known_is_not_kept_either(self, room: Room) -> None:
        # The server may have run the late action after the request, and told us of it before.
        room.table.doubt(S0, room.epoch)
        room.table.serve(S0, room.epoch, stay(B))
        room.table.fate_known(S0, room.epoch)
        room.table.served(S0, room.epoch, stay(B))

        assert (room.state(), room.table.slot_of(B)) == (SlotState.IDLE, None)

    def test_what_is_served_after_all_that_is_kept(self, room: Room) -> None:
        room.table.doubt(S0, room.epoch)
        room.house(stay(B))
        room.table.fate_known(S0, room.epoch)
        room.house(stay(B))

        assert room.table.slot_of(B) == room.table.view(S0)

    def test_a_request_dropped_while_the_fate_is_open_ends_in_quarantine(self, room: Room) -> None:
        room.table.doubt(S0, room.epoch)
        room.table.serve(S0, room.epoch, stay(B))
        room.table.broke_off(S0, room.epoch, SEEN_RUNNING)
        room.table.seen([idle(0)])

        assert room.state() is SlotState.QUARANTINED

    def test_two_late_actions_have_two_fates(self, room: Room) -> None:
        room.table.doubt(S0, room.epoch)
        room.table.serve(S0, room.epoch, None)
        room.table.doubt(S0, room.epoch)
        room.table.fate_known(S0, room.epoch)
        assert room.state() is SlotState.QUARANTINED

        room.table.fate_known(S0, room.epoch)
        assert room.state() is SlotState.IDLE


class TestEmptying:
    def test_a_request_sent_again_into_the_emptied_slot_is_its_sessions(self, room: Room) -> None:
        room.table.serve(S0, room.epoch, stay(A))
        assert room.table.start_emptying(S0, room.epoch)
        assert room.table.emptied(S0, room.epoch)
        room.table.served(S0, room.epoch, stay(A))
        assert room.table.view(S0).occupant == A

    def test_a_request_that_ends_before_the_erase_does_leaves_nothing_to_believe(self, room: Room) -> None:
        room.table.serve(S0, room.epoch, stay(A))
        room.table.start_emptying(S0, room.epoch)
        room.table.served(S0, room.epoch, stay(A))
        assert room.state() is SlotState.QUARANTINED
        room.table.fate_known(S0, room.epoch)
        assert room.state() is SlotState.IDLE

    def test_it_is_of_its_own_life_only(self, room: Room) -> None:
        room.table.begin_epoch(2)
        assert not room.table.start_emptying(S0, room.epoch)
        assert not room.table.emptied(S0, room.epoch)

    def test_an_erase_that_ends_after_its_request_was_dropped_and_seen_over_leaves_a_free_slot(
        self, room: Room
    ) -> None:
        room.table.serve(S0, room.epoch, stay(A))
        room.table.start_emptying(S0, room.epoch)
        room.table.broke_off(S0, room.epoch, SEEN_RUNNING)
        room.clock.advance(1)
        room.table.seen([idle(0), idle(1)])
        assert room.state() is SlotState.QUARANTINED

        assert room.table.emptied(S0, room.epoch)

        assert room.state() is SlotState.IDLE
        assert room.table.view(S0).occupant is None


class TestDraft:
    def test_a_look_tells_whether_a_draft_model_runs_ahead_and_a_new_life_forgets_it(
        self, room: Room
    ) -> None:
        assert not room.table.speculates
        room.table.seen([idle(0), replace(idle(1), is_speculative=True)])
        assert room.table.speculates
        room.table.begin_epoch(2)
        assert not room.table.speculates


class TestHolders:
    def test_a_slot_has_one_holder(self, room: Room) -> None:
        room.table.hold([S0], 1)
        assert room.table.view(S0).is_leased

        with pytest.raises(InvariantError, match="held by lease 1, not free for 2"):
            room.table.hold([S0], 2)

    def test_only_the_holder_lets_go(self, room: Room) -> None:
        room.table.hold([S0], 1)

        with pytest.raises(InvariantError, match="lease 2 gives back slot 0, held by 1"):
            room.table.let_go([S0], 2)
        room.table.let_go([S0], 1)
        assert room.table.view(S0).is_free

    def test_it_can_be_read_by_a_person(self, room: Room) -> None:
        room.table.hold([S1], 4)
        assert repr(room.table) == "<SlotTable epoch 1 [0:idle, 1:idle*]>"


class TestForeign:
    """Somebody else's tasks in slots that we believed idle."""

    def look(self, room: Room, *infos: SlotInfo) -> tuple[SlotId, ...]:
        room.clock.advance(1)
        return room.table.foreign(infos, room.clock.now())

    def test_a_task_that_was_not_there_before_ends_the_stay(self, room: Room) -> None:
        room.house(stay(A))
        assert self.look(room, idle(0, task=4), idle(1)) == ()
        assert self.look(room, idle(0, task=5), idle(1)) == (S0,)
        assert (room.state(), room.table.slot_of(A)) == (SlotState.IDLE, None)
        assert self.look(room, idle(0, task=5), idle(1)) == ()

    def test_one_in_a_slot_that_never_ran_any_is_seen_too_and_leaves_it_used(self, room: Room) -> None:
        self.look(room, idle(0), idle(1))
        assert self.look(room, idle(0), idle(1, task=3)) == (S1,)
        assert not room.table.view(S1).is_blank

    def test_one_that_still_runs_keeps_the_slot_until_it_is_seen_idle(self, room: Room) -> None:
        room.house(stay(A))
        assert self.look(room, processing(0, task=9)) == (S0,)
        assert (room.state(), room.table.unsettled) == (SlotState.CANCELLING, 1)

        room.clock.advance(1)
        assert room.table.seen([idle(0)], room.clock.now())
        assert (room.state(), room.table.slot_of(A)) == (SlotState.IDLE, None)

    def test_what_ran_under_a_lease_was_ours(self, room: Room) -> None:
        room.house(stay(A))
        self.look(room, idle(0, task=4))
        room.table.hold([S0], 7)
        assert self.look(room, idle(0, task=5)) == ()
        room.table.let_go([S0], 7)
        assert self.look(room, idle(0, task=6)) == ()
        assert room.table.slot_of(A) is not None

    def test_a_look_from_before_the_slot_was_given_back_says_nothing(self, room: Room) -> None:
        room.house(stay(A))
        asked_at = room.clock.now()
        room.clock.advance(1)
        room.table.hold([S0], 7)
        room.table.let_go([S0], 7)
        assert room.table.foreign([processing(0, task=4)], asked_at) == ()

    def test_a_slot_that_serves_is_not_looked_at(self, room: Room) -> None:
        self.look(room, idle(0, task=1))
        room.table.serve(S0, room.epoch, stay(A))
        assert self.look(room, processing(0, task=2)) == ()


class TestVolatile:
    """A launch clears every slot in which nothing runs."""

    @pytest.fixture
    def room(self, room: Room) -> Room:
        room.table.found_volatile()
        return room

    def launch(self, room: Room, slot: SlotId = S1) -> None:
        room.table.serve(slot, room.epoch, stay(B))
        room.table.launched(slot, room.epoch)

    def test_a_launch_ends_the_stays_in_all_other_slots(self, room: Room) -> None:
        room.house(stay(A, saved=1))

        self.launch(room)

        assert (room.state(), room.table.slot_of(A), room.table.is_adrift(A)) == ("idle", None, False)
        assert not room.table.view(S0).is_blank, "one that only ran out of room leaves some slots as they are"
        assert room.table.slot_of(B) is not None

    def test_before_the_launch_was_seen_nobody_is_lost(self, room: Room) -> None:
        room.house(stay(A, saved=1))
        room.table.serve(S1, room.epoch, stay(B))
        assert room.table.slot_of(A) is not None

    @pytest.mark.parametrize("way", ["looked", "served", "taken", "settled"])
    def test_a_launch_may_be_seen_in_many_ways(self, room: Room, way: str) -> None:
        room.house(stay(A, saved=1))
        if way == "taken":
            room.table.take(S1, room.epoch)
        else:
            room.table.serve(S1, room.epoch, stay(B))
        if way == "looked":
            room.table.seen([idle(0), processing(1)])
        elif way == "served":
            room.table.served(S1, room.epoch, stay(B))
        elif way == "settled":
            room.table.broke_off(S1, room.epoch, Settling(S1, was_seen=True))
            room.table.seen([idle(0), idle(1)])

        assert room.table.slot_of(A) is None

    def test_elsewhere_a_launch_ends_nothing(self) -> None:
        room = Room()
        room.house(stay(A))
        self.launch(room)
        assert room.table.slot_of(A) is not None

    def test_when_it_is_found_out_what_was_not_saved_is_adrift(self) -> None:
        room = Room()
        room.house(stay(A))
        room.house(stay(B, saved=1), S1)

        room.table.found_volatile()

        assert [room.table.is_adrift(key) for key in (A, B)] == [True, False]
        assert [room.state(slot) for slot in (S0, S1)] == ["idle", "idle"]

    def test_what_is_being_saved_meanwhile_is_not_believed_afterwards(self, room: Room) -> None:
        room.house(stay(A))
        room.table.hold([S0], 7)
        room.table.start_saving(S0, room.epoch)

        self.launch(room)
        assert room.state() is SlotState.SAVING
        room.table.save_ended(S0, room.epoch)

        assert (room.state(), room.table.is_adrift(A)) == ("idle", True)
        room.table.checkpointed(S0, room.epoch, A, Revision(1))
        assert not room.table.is_adrift(A)

    def test_a_slot_in_somebodys_hands_is_lost_when_it_is_given_back(self, room: Room) -> None:
        room.house(stay(A, saved=1))
        room.table.hold([S0], 7)

        self.launch(room)
        assert room.state() is SlotState.RESIDENT
        room.table.let_go([S0], 7)

        assert room.state() is SlotState.IDLE

    def test_slots_held_for_the_launch_itself_are_lost_by_it(self, room: Room) -> None:
        room.house(stay(A, saved=1))
        room.table.hold([S0, S1], 7)
        self.launch(room)
        assert room.state() is SlotState.IDLE

    def test_a_dropped_request_leaves_nothing_if_another_was_launched_meanwhile(self, room: Room) -> None:
        room.table.serve(S0, room.epoch, stay(A))
        room.table.launched(S0, room.epoch)
        room.table.broke_off(S0, room.epoch, SEEN_RUNNING)

        self.launch(room)
        room.table.seen([idle(0), processing(1)])

        assert (room.state(), room.table.is_adrift(A)) == ("idle", True)

    def test_what_a_running_request_leaves_is_not_touched_by_launches_before_its_end(
        self, room: Room
    ) -> None:
        room.table.serve(S0, room.epoch, stay(A))
        room.table.launched(S0, room.epoch)
        self.launch(room)
        room.table.served(S0, room.epoch, stay(A))
        assert room.table.slot_of(A) is not None

    def test_a_session_that_could_not_be_saved_is_adrift_until_it_is_served_again(self, room: Room) -> None:
        room.house(stay(A))

        room.table.drift(stay(A), room.epoch)
        assert (room.state(), room.table.is_adrift(A)) == ("idle", True)
        room.table.checkpointed(S0, room.epoch, A, Revision(0))
        assert room.table.is_adrift(A), "an older revision was published"
        room.table.serve(S0, room.epoch, stay(A))

        assert not room.table.is_adrift(A)

    def test_one_whose_unsaved_work_was_in_the_slot_that_an_unpinned_request_took_is_adrift(
        self, room: Room
    ) -> None:
        room.house(stay(A))
        room.table.take(S0, room.epoch)
        assert room.table.is_adrift(A)

    def test_of_a_great_many_that_are_adrift_the_newest_are_known(self, room: Room) -> None:
        keys = [SessionKey(f"{number:032x}") for number in range(3000)]
        for key in keys:
            room.table.drift(stay(key), room.epoch)
        known = [room.table.is_adrift(key) for key in keys]
        assert known == [False] * 2000 + [True] * 1000

    def test_nobody_is_adrift_in_a_new_life_which_is_not_known_to_be_volatile(self, room: Room) -> None:
        room.table.drift(stay(A), room.epoch)
        room.table.begin_epoch(2)
        assert (room.table.is_adrift(A), room.table.is_volatile) == (False, False)
        room.table.drift(stay(A), room.epoch)
        assert not room.table.is_adrift(A)


class TestCells:
    """How many tokens a slot is counted for: never fewer than it holds, as far as anybody can know."""

    def cells(self, room: Room, slot: SlotId = S0) -> int:
        return room.table.view(slot).cells

    def claimed(self, room: Room, claim: int, slot: SlotId = S0) -> None:
        room.table.hold([slot], 7, claim)

    def test_a_look_tells_what_an_earlier_owner_left(self) -> None:
        table = SlotTable(FakeClock())
        table.begin_epoch(2)
        table.seen([idle(0, tokens=300), idle(1)])
        assert [view.cells for view in table.views()] == [300, 0]

    def test_a_request_counts_for_all_it_may_come_to_need_until_its_answer_tells_what_it_left(
        self, room: Room
    ) -> None:
        self.claimed(room, 900)
        assert self.cells(room) == 900, "before it is sent"
        room.table.serve(S0, room.epoch, stay(A))
        assert self.cells(room) == 900
        room.table.served(S0, room.epoch, stay(A, tokens=400))
        room.table.let_go([S0], 7)
        assert self.cells(room) == 400

    def test_what_a_request_of_nobody_left_counts_too(self, room: Room) -> None:
        self.claimed(room, 900)
        room.table.serve(S0, room.epoch, None)
        room.table.served(S0, room.epoch, None, tokens=50)
        room.table.let_go([S0], 7)
        assert (self.cells(room), room.state()) == (50, SlotState.IDLE)

    def test_an_answer_that_did_not_tell_leaves_all_that_was_claimed(self, room: Room) -> None:
        self.claimed(room, 900)
        room.table.serve(S0, room.epoch, stay(A))
        room.table.served(S0, room.epoch, stay(A, tokens=None))
        room.table.let_go([S0], 7)
        assert self.cells(room) == 900

    def test_a_dropped_request_counts_for_its_claim_until_it_is_seen_idle_and_then_as_seen(
        self, room: Room
    ) -> None:
        self.claimed(room, 900)
        room.table.serve(S0, room.epoch, stay(A))
        room.table.broke_off(S0, room.epoch, SEEN_RUNNING)
        room.table.let_go([S0], 7)
        assert self.cells(room) == 900
        room.table.seen([idle(0, tokens=123), idle(1)])
        assert self.cells(room) == 123

    def test_a_look_at_a_slot_at_rest_corrects_what_was_thought(self, room: Room) -> None:
        room.house(stay(A, tokens=400))
        room.clock.advance(1)
        room.table.seen([idle(0, tokens=410), idle(1)], room.clock.now())
        assert self.cells(room) == 410

    def test_a_look_that_began_before_it_changed_does_not(self, room: Room) -> None:
        asked_at = room.clock.now()
        room.clock.advance(1)
        room.house(stay(A, tokens=400))
        room.table.seen([idle(0, tokens=10), idle(1)], asked_at)
        assert self.cells(room) == 400

    def test_an_erased_slot_counts_for_nothing_and_one_that_was_only_left_as_before(self, room: Room) -> None:
        room.house(stay(A, tokens=400))
        room.table.lose(S0, room.epoch)
        assert self.cells(room) == 400
        room.table.lose(S0, room.epoch, is_blank=True)
        assert self.cells(room) == 0

    def test_a_restore_counts_as_what_it_brought_and_a_refused_one_as_nothing(self, room: Room) -> None:
        room.table.start_restoring(S0, room.epoch)
        room.table.restored(S0, room.epoch, stay(A, tokens=700))
        assert self.cells(room) == 700
        room.table.lose(S0, room.epoch)
        room.table.start_restoring(S0, room.epoch)
        room.table.not_restored(S0, room.epoch, is_blank=True)
        assert self.cells(room) == 0

    def test_a_launch_that_clears_idle_slots_makes_room(self, room: Room) -> None:
        room.house(stay(A, tokens=400))
        room.table.serve(S1, room.epoch, None)
        room.table.served(S1, room.epoch, None, tokens=60)
        room.table.found_volatile()
        room.table.serve(S0, room.epoch, stay(B))
        room.table.launched(S0, room.epoch)
        assert self.cells(room, S1) == 0

    def test_a_new_life_has_no_shared_memory_that_is_known(self, room: Room) -> None:
        room.table.pool = 1000
        room.table.begin_epoch(2)
        assert room.table.pool is None


class TestSurety:
    """Whether a slot may have been emptied to make room in a memory of 1000 tokens that all share."""

    @pytest.fixture
    def room(self) -> Room:
        room = Room()
        room.table.pool = 1000
        return room

    def run_beside(self, room: Room, claim: int, worst: int) -> None:
        room.table.hold([S1], 7, claim, worst)
        room.table.serve(S1, room.epoch, stay(B))

    def end(self, room: Room, tokens: int) -> None:
        room.table.served(S1, room.epoch, stay(B, tokens=tokens))
        room.table.let_go([S1], 7)

    def is_sure(self, room: Room, slot: SlotId = S0) -> bool:
        return room.table.view(slot).is_sure

    def look(self, room: Room, *tokens: int | None) -> None:
        room.clock.advance(1)
        infos = [idle(slot, tokens=held) for slot, held in enumerate(tokens)]
        room.table.seen(infos, room.clock.now())

    def test_beside_what_fits_at_its_worst_it_is_sure(self, room: Room) -> None:
        room.house(stay(A, tokens=400))
        self.run_beside(room, 500, 600)
        self.end(room, 600)
        assert self.is_sure(room)
        assert self.is_sure(room, S1)

    def test_beside_an_answer_that_may_go_on_it_is_not_until_it_was_seen_afterwards(self, room: Room) -> None:
        room.house(stay(A, tokens=400))
        self.run_beside(room, 500, 1000)
        assert not self.is_sure(room)
        self.look(room, 400, None)
        assert not self.is_sure(room), "it may still go on"
        self.end(room, 300)
        assert not self.is_sure(room)
        self.look(room, 400, 300)
        assert self.is_sure(room)

    def test_one_that_was_used_meanwhile_is_as_unsure_as_long_as_the_other_runs(self, room: Room) -> None:
        self.run_beside(room, 500, 1000)
        room.house(stay(A, tokens=400))
        assert not self.is_sure(room)

    def test_a_dropped_answer_may_go_on_as_well(self, room: Room) -> None:
        self.run_beside(room, 500, 1000)
        room.table.broke_off(S1, room.epoch, replace(SEEN_RUNNING, slot=S1))
        room.table.let_go([S1], 7)
        room.house(stay(A, tokens=400))
        assert not self.is_sure(room)
        self.look(room, 400, 300)
        self.look(room, 400, 300)
        assert self.is_sure(room)

    def test_slots_that_are_believed_to_hold_more_than_there_is_are_not_sure(self, room: Room) -> None:
        room.house(stay(A, tokens=400))
        room.house(stay(B, tokens=700), S1)
        assert not self.is_sure(room, S1)

    def test_where_each_has_a_memory_of_its_own_all_are(self, room: Room) -> None:
        room.table.pool = None
        room.house(stay(A, tokens=400))
        self.run_beside(room, 500, 1000)
        assert self.is_sure(room)

    def test_a_slot_that_is_seen_to_hold_nothing_any_more_is_nobodys(self, room: Room) -> None:
        room.house(stay(A, tokens=400))
        self.look(room, 0, None)
        assert (room.state(), room.table.view(S0).is_blank) == (SlotState.IDLE, True)
        assert not room.table.is_adrift(A), "the server has not kept it anywhere else"

    def test_where_idle_slots_are_cleared_its_session_is_adrift(self, room: Room) -> None:
        room.house(stay(A, tokens=400))
        room.table.is_volatile = True
        self.look(room, 0, None)
        assert (room.state(), room.table.is_adrift(A)) == (SlotState.IDLE, True)

    def test_what_a_look_does_not_tell_takes_nobody_away(self, room: Room) -> None:
        room.house(stay(A, tokens=400))
        self.look(room, None, None)
        assert room.state() is SlotState.RESIDENT

    def test_a_look_that_began_before_the_slot_was_used_takes_nobody_away(self, room: Room) -> None:
        asked_at = room.clock.now()
        room.clock.advance(1)
        room.house(stay(A, tokens=400))
        room.table.seen([idle(0, tokens=0), idle(1)], asked_at)
        assert room.state() is SlotState.RESIDENT
