from __future__ import annotations

from dataclasses import replace

import pytest

from kvproxy.boundary.turn import Asked
from kvproxy.checkpoint.cutter import is_worth_cutting
from kvproxy.checkpoint.outcome import Restoration, RestoreOutcome, Verdict
from kvproxy.identifiers import Revision, SlotId
from kvproxy.slotfile.prefix import Uncut
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.manifest import Manifest
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.telemetry.events import Warned
from kvproxy.upstream.replies import ActionFailure, Fault, Obstacle, Restored, Unavailable
from tests.support.fakes_core import FINGERPRINT, PROPS, A, Late, World, generation_of, manifest_of, settle

S0 = SlotId(0)
GIGABYTE = 1 << 30
SHARED = 200
ASKED = Asked("chat/completions", {"messages": [{"role": "user", "content": "in short"}]})


def world(*, shared: int | None = SHARED, size_bytes: int = GIGABYTE) -> World:
    """Session A is stored, a gigabyte of 1,000 tokens, of which the prompt shares `shared`."""
    made = World()
    made.standing.set(kind=MemoryKind.FULL)
    made.session(A)
    made.keep(manifest_of(A, generation_of(size_bytes=size_bytes)))
    made.files.shared = shared
    made.server.answer("restore", Restored(SHARED, 2000))
    return made


async def restore(w: World, asked: Asked | None = ASKED) -> Restoration:
    result = await w.restorer.restore(S0, w.table.epoch, A, Revision(0), asked)
    await settle()
    return result


def stored(w: World) -> Manifest:
    manifest = w.store.find(A, FINGERPRINT)
    assert manifest is not None
    return manifest


def restored_names(w: World) -> list[str]:
    return [line.split()[2] for line in w.log if line.startswith("restore 0 ")]


@pytest.mark.parametrize(
    ("shared", "stored_tokens", "worth"),
    [
        (16, 1000, True),
        (333, 1000, True),
        (334, 1000, False),
        (1000, 1000, False),
        (15, 1000, False),
        (0, 9, False),
    ],
)
def test_a_cut_is_worth_it_where_moving_it_three_times_is_less_than_moving_all(
    shared: int, stored_tokens: int, worth: bool
) -> None:
    assert is_worth_cutting(shared, stored_tokens) is worth


async def test_only_what_the_prompt_shares_is_restored_and_the_cut_goes_again() -> None:
    w = world()

    assert await restore(w) == Restoration(RestoreOutcome.RESTORED, SHARED, 2000)

    (cut,) = w.files.made
    assert w.log == ["render", f"cut {SHARED}", "mark", f"restore 0 {cut}", "clear", "delete"]
    assert w.files.deleted == [cut]
    assert w.restorer.cutter.names_in_flight() == frozenset()
    view = w.table.view(S0)
    assert view.occupancy is not None
    assert (view.occupancy.tokens, view.occupancy.is_dirty) == (SHARED, False)


async def test_the_mark_is_the_snapshots_so_that_a_file_that_kills_is_never_tried_again() -> None:
    w = world()
    seen: list[frozenset[str]] = []
    marked = w.store.mark_restoring

    async def watched(name: object) -> object:
        result = await marked(name)  # type: ignore[arg-type]
        seen.append(w.store.restoring())
        return result

    w.store.mark_restoring = watched  # type: ignore[assignment,method-assign]
    await restore(w)
    assert seen == [frozenset({stored(w).current.name})]


async def test_a_quick_restore_asks_nothing() -> None:
    w = world(size_bytes=5000)
    w.server.answer("restore", Restored(1000, 5000))
    assert (await restore(w)).tokens == 1000
    assert "render" not in w.log


NOT_CUT = {
    "the prompt shares most of it": {"shared": 900},
    "it shares next to nothing": {"shared": 3},
    "the file's ids cannot be read": {"shared": None},
}


@pytest.mark.parametrize("case", NOT_CUT)
async def test_where_it_does_not_pay_all_is_restored(case: str) -> None:
    w = world(**NOT_CUT[case])
    w.server.answer("restore", Restored(1000, 5000))
    assert (await restore(w)).tokens == 1000
    assert w.files.made == w.files.deleted == []


@pytest.mark.parametrize("kind", [kind for kind in MemoryKind if kind is not MemoryKind.FULL])
async def test_only_full_attention_is_cut(kind: MemoryKind) -> None:
    w = world()
    w.standing.set(kind=kind)
    await restore(w)
    assert w.files.made == []


async def test_nothing_is_cut_where_it_cannot_be_done() -> None:
    for change in ("invisible", "no request", "not rendered", "not cut", "not allowed", "no room"):
        w, asked = world(), ASKED
        w.server.answer("restore", Restored(1000, 5000))
        if change == "invisible":
            w.files.is_visible = False
        elif change == "no request":
            asked = None  # type: ignore[assignment]
        elif change == "not rendered":
            w.server.answer("render", Unavailable(Obstacle.UNREACHABLE, "gone"))
        elif change == "no room":
            w.files.free = [GIGABYTE // 3]
        elif change == "not cut":
            w.files.uncut = Uncut.NOT_WRITTEN
        else:
            w.alterations.missed(Alteration.PREFIX_CUT, FINGERPRINT)
        assert (await restore(w, asked)).tokens == 1000, change
        assert w.files.made == []
        assert w.restorer.cutter.names_in_flight() == frozenset()


async def test_a_cut_that_is_late_stays_until_the_server_is_done_with_it() -> None:
    w = world()
    late = Late()
    w.server.answer("restore", late)
    assert (await restore(w)).outcome is RestoreOutcome.TIMED_OUT
    assert w.files.deleted == []
    assert w.restorer.cutter.names_in_flight() == set(w.files.made)
    late.end(Restored(SHARED, 2000))
    await settle()
    assert w.files.deleted == w.files.made


@pytest.mark.parametrize(
    "answer", [ActionFailure(Fault.REFUSED, "Unable to restore slot", 400), Restored(SHARED - 1, 2000)]
)
async def test_a_cut_that_the_server_does_not_take_is_the_last_and_the_snapshot_not_to_blame(
    answer: object,
) -> None:
    w = world()
    w.server.answer("restore", answer)
    assert (await restore(w)).outcome.is_failure
    assert stored(w).current.is_valid
    assert not w.alterations.may(Alteration.PREFIX_CUT, FINGERPRINT)
    assert w.files.deleted == w.files.made


async def test_a_cut_that_was_not_reused_is_the_last() -> None:
    w = world()
    await restore(w)
    w.restorer.proofs.proved(S0, A, Verdict.INEFFECTIVE)
    await settle()
    assert not w.alterations.may(Alteration.PREFIX_CUT, FINGERPRINT)
    assert stored(w).current.is_valid
    assert w.standing.facts.persistence.is_on
    assert len(w.sink.of(Warned)) == 1


async def test_one_that_was_reused_is_not() -> None:
    w = world()
    await restore(w)
    w.restorer.proofs.proved(S0, A, Verdict.CONFIRMED)
    await settle()
    assert w.alterations.may(Alteration.PREFIX_CUT, FINGERPRINT)


@pytest.mark.parametrize(
    ("n_ctx", "bytes_per_token", "wanted"),
    [(8192, 65_536, True), (8192, 1_000, False), (None, 65_536, False), (100_000, 1_000, True)],
)
def test_requests_are_understood_where_a_full_slot_takes_long(
    n_ctx: int | None, bytes_per_token: int, wanted: bool
) -> None:
    w = world()
    w.actions.learn(1, bytes_per_token)
    w.standing.set(props=replace(PROPS, n_ctx=n_ctx))
    assert w.restorer.cutter.is_wanted is wanted
    w.standing.set(kind=MemoryKind.HYBRID)
    assert not w.restorer.cutter.is_wanted
