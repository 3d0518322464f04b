from __future__ import annotations

import pytest

from kvproxy.checkpoint.outcome import Trigger, Verdict
from kvproxy.checkpoint.proofs import MISSED, OPENED_MISSED
from kvproxy.identifiers import Revision, SessionKey, SlotId
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.manifest import Origin
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.names import new_name
from kvproxy.upstream.facts import WINDOW_MISSED, WindowFacts
from tests.support.fakes_core import (
    FINGERPRINT,
    OWNER,
    A,
    B,
    C,
    World,
    generation_of,
    manifest_of,
    settle,
    stay,
)

S0 = SlotId(0)
ORIGIN = Origin(alteration=Alteration.WINDOW_EDIT, name=new_name(OWNER))


def world() -> World:
    made = World(slots=1)
    for key in (A, B, C):
        made.session(key)
        made.keep(manifest_of(key, generation_of()))
    return made


async def restored(w: World, key: SessionKey, verdict: Verdict = Verdict.INEFFECTIVE) -> None:
    """Restore `key` into the slot, whoever is there, and hear what its answer proved."""
    if w.occupant() is not None:
        w.table.lose(S0, w.table.epoch)
    await w.restorer.restore(S0, w.table.epoch, key, Revision(0))
    w.restorer.proofs.proved(S0, key, verdict)
    await settle()


def reason(w: World, key: SessionKey = A) -> str | None:
    manifest = w.store.find(key, FINGERPRINT)
    assert manifest is not None
    return manifest.current.invalid_reason


async def test_a_snapshot_that_twice_gave_nothing_is_retired_and_says_why() -> None:
    w = world()
    await restored(w, A)
    assert reason(w) is None
    await restored(w, A)
    assert reason(w) == MISSED


async def test_three_conversations_that_get_nothing_switch_restoring_off_and_leave_the_snapshots() -> None:
    w = world()
    for key in (A, B, C):
        await restored(w, key)
    assert not w.standing.facts.persistence.is_on
    assert [reason(w, key) for key in (A, B, C)] == [None] * 3
    assert len(w.unable) == 1


async def test_a_kind_of_memory_that_explains_it_stops_the_saves_too() -> None:
    w = world()
    w.files.kind = MemoryKind.RECURRENT
    for key in (A, B, C):
        await restored(w, key)
    assert "the model is recurrent" in w.unable[0]
    w.house(0, stay(B))
    assert (await w.checkpointer.save(S0, w.table.epoch, Trigger.MANUAL)).outcome == "off"


async def test_where_nothing_explains_it_the_next_life_finds_what_is_saved() -> None:
    w = world()
    for key in (A, B, C):
        await restored(w, key)
    w.table.lose(S0, w.table.epoch)
    w.house(0, stay(B))
    assert (await w.checkpointer.save(S0, w.table.epoch, Trigger.MANUAL)).outcome == "published"


async def test_only_the_first_answer_after_a_restore_is_a_proof_of_it() -> None:
    w = world()
    await restored(w, A, Verdict.CONFIRMED)
    for _ in range(4):
        w.restorer.proofs.proved(S0, A, Verdict.INEFFECTIVE)
    await settle()
    assert reason(w) is None


async def test_an_answer_to_another_session_or_of_another_life_proves_nothing() -> None:
    w = world()
    for _ in range(2):
        w.table.lose(S0, w.table.epoch)
        await w.restorer.restore(S0, w.table.epoch, A, Revision(0))
        w.restorer.proofs.proved(S0, B, Verdict.INEFFECTIVE)
    await restored(w, B)
    w.table.lose(S0, w.table.epoch)
    await w.restorer.restore(S0, w.table.epoch, B, Revision(0))
    w.live(1)
    w.restorer.proofs.proved(S0, B, Verdict.INEFFECTIVE)
    await settle()
    assert reason(w) is None
    assert reason(w, B) is None


async def test_slots_that_are_cleared_behind_our_back_prove_nothing_of_restores() -> None:
    w = world()
    w.standing.set(is_volatile=True)
    for _ in range(3):
        await restored(w, A)
    assert reason(w) is None


class TestOpenedWindow:
    """One miss of a snapshot whose window was opened is enough, for all of them at this server."""

    def world(self) -> World:
        w = World(slots=1)
        w.standing.set(kind=MemoryKind.FULL, window=WindowFacts(64, is_whole=False))
        for key in (A, B):
            w.session(key)
            w.keep(manifest_of(key, generation_of(origin=ORIGIN)))
        return w

    @pytest.mark.parametrize("is_volatile", [True, False])
    @pytest.mark.parametrize("verdict", [Verdict.INEFFECTIVE, Verdict.DIVERGED])
    async def test_it_is_retired_and_nothing_restored_any_more(
        self, verdict: Verdict, is_volatile: bool
    ) -> None:
        w = self.world()
        w.standing.set(is_volatile=is_volatile)
        await restored(w, A, verdict)
        assert reason(w) == OPENED_MISSED
        assert w.unable == [WINDOW_MISSED]
        assert not w.alterations.may(Alteration.WINDOW_EDIT, FINGERPRINT)
        assert not w.standing.facts.persistence.is_on

    @pytest.mark.parametrize("verdict", [Verdict.CONFIRMED, Verdict.UNKNOWN])
    async def test_a_hit_and_an_answer_that_tells_nothing_leave_it_on(self, verdict: Verdict) -> None:
        w = self.world()
        await restored(w, A, verdict)
        assert reason(w) is None
        assert w.alterations.may(Alteration.WINDOW_EDIT, FINGERPRINT)
        assert w.standing.facts.persistence.is_on
