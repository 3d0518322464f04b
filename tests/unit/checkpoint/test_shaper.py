from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvproxy.boundary.continuations import Ending
from kvproxy.boundary.evidence import OWN_STREAK
from kvproxy.boundary.turn import Asked, Turn
from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.checkpoint.policy import CheckpointPolicy
from kvproxy.checkpoint.shaper import SWITCH_REWIND_SECONDS
from kvproxy.identifiers import Revision, SlotId
from kvproxy.slots.leases import Purpose, Want
from kvproxy.slots.settling import QUIET_SECONDS
from kvproxy.slots.slot import Stump
from kvproxy.snapshots.manifest import digest_of_ids
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.upstream.facts import ServerState
from kvproxy.upstream.replies import Obstacle, Saved, Unavailable
from tests.support.fakes_core import FINGERPRINT, A, B, C, World, idle, processing, settle, stay

S0 = SlotId(0)
QUESTION = "a question that is long enough to be worth remembering where its answer began"
DOCUMENT = {"messages": [{"role": "user", "content": QUESTION}]}
PROMPT = f"<user>{QUESTION}<assistant>"
BOUNDARY = tuple(PROMPT.encode())[:-1]
"""All of the prompt but its last token, so that the same request may be made again."""


def world(kind: MemoryKind = MemoryKind.HYBRID, *, revision: int = 1, turn_of: int = 1) -> World:
    """Session A lives in slot 0, dirty, and its last turn is remembered."""
    made = World(policy=CheckpointPolicy(min_tokens=0))
    made.standing.set(kind=kind)
    session = made.session(A)
    made.house(0, stay(A, revision=revision, tokens=len(PROMPT) + 40))
    asked = Asked("chat/completions", DOCUMENT)
    session.turn = Turn(asked, Ending.TEXT, len(PROMPT), Revision(turn_of))
    made.server.answer("save", Saved(len(BOUNDARY), 5000))
    return made


async def save(w: World, trigger: Trigger = Trigger.IDLE) -> CheckpointOutcome:
    result = await w.checkpointer.save(S0, w.table.epoch, trigger)
    await settle()
    return result.outcome


def evaluated(w: World) -> list[str]:
    return [line for line in w.log if line.startswith("evaluate")]


class TestForm:
    @pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.RECURRENT, MemoryKind.SLIDING_WINDOW])
    async def test_memory_that_cannot_roll_back_is_saved_where_the_reply_began(
        self, kind: MemoryKind
    ) -> None:
        w = world(kind)

        assert await save(w) is CheckpointOutcome.PUBLISHED

        assert w.log.index(f"evaluate 0 {len(BOUNDARY)}") < w.log.index("save 0")
        manifest = w.store.find(A, FINGERPRINT)
        assert manifest is not None
        assert (manifest.current.form, manifest.current.tokens) == ("boundary", len(BOUNDARY))
        assert manifest.current.ids_digest == digest_of_ids(BOUNDARY)

    @pytest.mark.parametrize("kind", [MemoryKind.FULL, MemoryKind.UNKNOWN])
    async def test_a_plain_model_never_pays_for_a_boundary(self, kind: MemoryKind) -> None:
        w = world(kind)
        w.server.answer("save", Saved(1000, 5000))

        assert await save(w) is CheckpointOutcome.PUBLISHED

        assert (evaluated(w), "render" in w.log) == ([], False)
        assert not w.shaper.is_needed

    async def test_the_slot_holds_the_boundary_from_then_on_and_is_clean(self) -> None:
        w = world()
        await save(w)
        view = w.table.view(S0)
        assert view.occupancy is not None
        assert (view.is_dirty, view.occupancy.is_boundary) == (False, True)
        assert view.occupancy.tokens == len(BOUNDARY)

    async def test_a_reply_that_was_not_remembered_is_saved_as_it_is(self) -> None:
        w = world(revision=2, turn_of=1)
        w.server.answer("save", Saved(1000, 5000))
        assert await save(w) is CheckpointOutcome.PUBLISHED
        assert evaluated(w) == []

    async def test_a_prompt_that_the_server_renders_otherwise_is_saved_as_it_is(self) -> None:
        w = world()
        w.server.answer("render", "another prompt altogether, and another length too")
        w.server.answer("save", Saved(1000, 5000))
        assert await save(w) is CheckpointOutcome.PUBLISHED
        assert evaluated(w) == []

    async def test_a_client_that_sends_replies_back_as_they_were_is_saved_as_it_is(self) -> None:
        w = world()
        session = w.session(A)
        for _ in range(OWN_STREAK):
            w.shaper.observe(session, stay(A, tokens=500), 600, 500)
        w.server.answer("save", Saved(1000, 5000))
        assert await save(w) is CheckpointOutcome.PUBLISHED
        assert evaluated(w) == []

    async def test_nothing_is_gone_back_to_of_which_only_the_end_is_there(self) -> None:
        w = world(MemoryKind.SLIDING_WINDOW)
        held = replace(stay(A, tokens=len(PROMPT) + 40), stump=Stump(len(BOUNDARY) + 1, None))
        w.house(0, held)
        w.server.answer("save", Saved(1000, 5000))
        assert await save(w) is CheckpointOutcome.PUBLISHED
        assert evaluated(w) == []

    async def test_on_a_switch_a_history_that_is_shown_in_another_way_is_saved_as_it_is(self) -> None:
        """Hardly anything of it is in the slot, and a handful of tokens is worth no file."""
        w = world()
        other = PROMPT[:5] + "a history as a template shows it that moves the tools to the last question"
        w.server.answer("render", PROMPT, f"{other}<Xyz", f"{other}<other", f"{other}<So")
        w.server.answer("save", Saved(1000, 5000))

        assert await save(w, Trigger.SWITCH) is CheckpointOutcome.PUBLISHED

        assert evaluated(w) == []
        manifest = w.store.find(A, FINGERPRINT)
        assert manifest is not None
        assert manifest.current.form == "plain"

    async def test_on_a_switch_little_time_is_taken(self) -> None:
        w = world()
        await save(w, Trigger.SWITCH)
        assert w.server.patience["complete"] == SWITCH_REWIND_SECONDS


class TestNotRewound:
    """The server may still be computing in the slot, and a request pinned to it would meet that."""

    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvproxy.checkpoint.shaper.CONFIRM_SECONDS", 0)

    def lost(self) -> tuple[World, asyncio.Future[object]]:
        """A world where that happens, and the second look at the slots."""
        w = world()
        looked: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        w.server.answer("complete", Unavailable(Obstacle.UNREACHABLE, "no answer within 60 s"))
        w.server.answer("slots", (processing(0), idle(1)), looked)
        return w, looked

    async def test_the_save_does_not_end_before_the_slot_was_seen_idle(self) -> None:
        w, looked = self.lost()
        saving = asyncio.ensure_future(save(w))
        await settle()
        assert (w.state(), saving.done()) == ("saving", False)

        looked.set_result((idle(0), idle(1)))

        assert await saving is CheckpointOutcome.FAILED
        assert (w.state(), w.occupant()) == ("idle", None)
        assert "save 0" not in w.log

    async def test_one_that_was_not_seen_to_run_may_come_yet_and_is_waited_for(self) -> None:
        w = world()
        w.server.answer("complete", Unavailable(Obstacle.UNREACHABLE, "no answer within 60 s"))
        w.server.answer("slots", (idle(0), idle(1)))
        saving = asyncio.ensure_future(save(w))
        await settle()
        assert (w.state(), saving.done()) == ("saving", False)

        w.clock.advance(QUIET_SECONDS + 0.1)

        assert await saving is CheckpointOutcome.FAILED
        assert w.state() == "idle"

    async def test_whoever_is_to_have_the_slot_waits_for_that(self) -> None:
        w, looked = self.lost()
        lease = await w.desk.acquire(Want(Purpose.PINNED, w.session(B).key))
        while lease.slot != S0:
            lease = await w.desk.acquire(Want(Purpose.PINNED, w.session(C).key))
        preparing = asyncio.ensure_future(w.preparer.prepare(lease, w.session(C), None))
        await settle()
        assert not preparing.done()

        looked.set_result((idle(0), idle(1)))
        await preparing

        assert w.state() == "idle"

    async def test_a_server_that_is_away_is_not_waited_for_and_the_slot_quarantined(self) -> None:
        w, looked = self.lost()
        w.standing.set(state=ServerState.UNREACHABLE)

        assert await save(w) is CheckpointOutcome.FAILED
        assert (w.state(), w.occupant()) == ("quarantined", None)

        looked.set_result((idle(0), idle(1)))
        await settle()
        assert w.state() == "idle"

    async def test_nothing_is_computed_in_the_slot_of_another_process(self) -> None:
        w = world()
        rendering: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        w.server.answer("render", rendering)
        saving = asyncio.ensure_future(save(w))
        await settle()

        w.table.begin_epoch(2)
        rendering.set_result(PROMPT)

        assert await saving is CheckpointOutcome.FAILED
        assert "render" in w.log
        assert evaluated(w) == []


class TestRemembered:
    async def test_the_ids_of_a_plain_snapshot_are_read_where_memory_cannot_roll_back(self) -> None:
        w = world(revision=2, turn_of=1)
        w.files.ids = "e" * 64
        w.server.answer("save", Saved(1000, 5000))
        await save(w)
        manifest = w.store.find(A, FINGERPRINT)
        assert manifest is not None
        assert (manifest.current.form, manifest.current.ids_digest) == ("plain", "e" * 64)

    async def test_those_of_full_attention_are_of_no_use_and_not_read(self) -> None:
        w = world(MemoryKind.FULL)
        w.server.answer("save", Saved(1000, 5000))
        await save(w)
        assert w.files.ids_read == 0
