from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvproxy.identifiers import Revision, SlotId
from kvproxy.slots.slot import Occupancy, SlotView, Stump
from kvproxy.slots.state import SlotState
from tests.support.fakes_core import A

STAY = Occupancy(A, Revision(3), Revision(3), tokens=100)
NEW = Occupancy(A, Revision(0), Revision(0))


def view(state: SlotState, stay: Occupancy | None = None, *, is_leased: bool = False) -> SlotView:
    return SlotView(SlotId(0), state, stay, is_leased, 0.0, False)


def test_a_stay_is_clean_as_long_as_what_was_saved_is_the_newest() -> None:
    assert not STAY.is_dirty
    assert STAY.changed(1.0, 120, 20).is_dirty


def test_a_request_counts_one_revision_and_adds_to_what_is_unsaved() -> None:
    twice = STAY.changed(1.0, 120, 20).changed(5.0, 150, 30)

    assert (twice.revision, twice.tokens, twice.unsaved_tokens) == (5, 150, 50)
    assert twice.checkpointed_revision == 3


def test_what_a_request_does_not_change_stays_as_it_was() -> None:
    full = replace(STAY, is_boundary=True, stump=Stump(50, "digest"), saving=Revision(2))
    changed = full.changed(1.0, 120, 20)

    altered = {
        "revision",
        "tokens",
        "unsaved_tokens",
        "dirty_since",
        "is_boundary",
        "later_tokens",
        "later_since",
    }
    for name in {each.name for each in fields(Occupancy)} - altered:
        assert getattr(full, name) != getattr(NEW, name) or name == "session"
        assert getattr(changed, name) == getattr(full, name)
    assert not changed.is_boundary


def test_dirtiness_dates_from_the_first_change_since_the_last_checkpoint() -> None:
    assert STAY.changed(1.0, 120, 20).changed(5.0, 150, 30).dirty_since == 1.0


def test_a_checkpoint_of_the_newest_revision_leaves_nothing_unsaved() -> None:
    saved = STAY.changed(1.0, 120, 20).checkpointed(Revision(4))

    assert (saved.is_dirty, saved.unsaved_tokens, saved.dirty_since) == (False, 0, None)


def test_work_that_was_finished_while_the_checkpoint_ran_is_dirty_since_then_and_alone() -> None:
    saving = STAY.changed(1.0, 120, 20).begin_checkpoint()
    later = saving.changed(2.0, 150, 30).changed(3.0, 160, 10)

    saved = later.checkpointed(Revision(4))

    assert (saved.is_dirty, saved.unsaved_tokens, saved.dirty_since) == (True, 40, 2.0)


def test_until_it_is_published_what_is_being_saved_is_as_unsaved_as_before() -> None:
    later = STAY.changed(1.0, 120, 20).begin_checkpoint().changed(2.0, 150, 30)
    assert (later.unsaved_tokens, later.dirty_since) == (50, 1.0)


def test_a_checkpoint_that_failed_leaves_nothing_behind_and_the_next_one_counts_anew() -> None:
    failed = STAY.changed(1.0, 120, 20).begin_checkpoint().changed(2.0, 150, 30)
    saved = failed.begin_checkpoint().changed(5.0, 160, 10).checkpointed(Revision(5))
    assert (saved.unsaved_tokens, saved.dirty_since) == (10, 5.0)


def test_of_two_checkpoints_under_way_the_earlier_does_not_speak_for_the_later() -> None:
    first = STAY.changed(1.0, 120, 20).begin_checkpoint()
    second = first.changed(2.0, 150, 30).begin_checkpoint().changed(3.0, 160, 10)
    saved = second.checkpointed(Revision(4))
    assert (saved.unsaved_tokens, saved.dirty_since) == (60, 1.0)
    assert saved.checkpointed(Revision(5)).dirty_since == 3.0


@pytest.mark.parametrize("state", SlotState)
def test_only_a_slot_that_does_nothing_and_that_nobody_holds_is_free(state: SlotState) -> None:
    assert view(state).is_free is (state in (SlotState.IDLE, SlotState.RESIDENT))
    assert not view(state, is_leased=True).is_free


def test_an_empty_slot_has_no_occupant_and_is_not_dirty() -> None:
    assert (view(SlotState.IDLE).occupant, view(SlotState.IDLE).is_dirty) == (None, False)
    dirty = view(SlotState.RESIDENT, STAY.changed(1.0, 1, 1))
    assert (dirty.occupant, dirty.is_dirty) == (A, True)
