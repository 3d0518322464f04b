from __future__ import annotations

import pytest

from kvproxy.checkpoint.opener import Written
from kvproxy.checkpoint.outcome import CheckpointOutcome, Trigger
from kvproxy.checkpoint.room import MARGIN_BYTES
from kvproxy.identifiers import SlotId
from kvproxy.slotfile.window import Closed
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.files import FileCheck
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.manifest import Generation
from kvproxy.snapshots.names import new_name
from kvproxy.telemetry.events import Warned
from kvproxy.upstream.facts import WindowFacts
from tests.support.fakes_core import FINGERPRINT, OWNER, A, World, settle, stay

S0 = SlotId(0)


def world(opened: int | None = 64) -> World:
    made = World()
    made.standing.set(window=WindowFacts(opened, is_whole=False))
    made.house(0, stay(A))
    return made


async def save(w: World) -> CheckpointOutcome:
    result = await w.checkpointer.save(S0, w.table.epoch, Trigger.MANUAL)
    await settle()
    return result.outcome


def published(w: World) -> Generation:
    manifest = w.store.find(A, FINGERPRINT)
    assert manifest is not None
    return manifest.current


async def test_the_copy_is_published_with_its_origin_and_the_servers_file_goes() -> None:
    w = world()

    assert await save(w) is CheckpointOutcome.PUBLISHED

    assert w.log == ["save 0", "open 64", "publish", "delete"]
    one = published(w)
    assert [one.name] == w.files.made
    assert one.origin is not None
    assert one.origin.alteration is Alteration.WINDOW_EDIT
    assert [one.origin.name] == w.files.deleted
    assert w.checkpointer.names_in_flight() == set()


async def test_a_server_that_needs_no_such_thing_gets_its_own_file_back() -> None:
    w = world(None)
    await save(w)
    assert w.log == ["save 0", "publish"]
    assert published(w).origin is None


async def test_what_another_server_saved_is_left_as_it_is() -> None:
    """The model was changed between the save and its publication."""
    w = world()
    other = Fingerprint.from_dict({"model_path": "/models/two.gguf", "build": "b11434"})
    name = new_name(OWNER)
    assert await w.checkpointer.publisher.opener.open(name, 5000, other) == Written(name)
    assert w.files.made == []


@pytest.mark.parametrize("refusal", [one for one in Closed if one not in (Closed.NO_WINDOW, Closed.NO_ROOM)])
async def test_a_window_that_cannot_be_opened_is_told_once_and_the_snapshot_kept(refusal: Closed) -> None:
    w = world()
    w.files.shut = refusal
    await save(w)
    w.house(0, stay(A, revision=2, saved=1))
    await save(w)
    (told,) = w.sink.of(Warned)
    assert refusal in told.message
    assert published(w).origin is None
    assert w.checkpointer.names_in_flight() == set()


async def test_a_copy_that_may_not_fit_on_the_disk_is_not_begun() -> None:
    w = world()
    w.files.free = [10 * MARGIN_BYTES, MARGIN_BYTES + 4999]
    assert await save(w) is CheckpointOutcome.PUBLISHED
    assert w.files.made == []
    assert "no-room" in w.sink.of(Warned)[0].message


async def test_a_conversation_that_fits_the_window_is_no_trouble() -> None:
    w = world()
    w.files.shut = Closed.NO_WINDOW
    assert await save(w) is CheckpointOutcome.PUBLISHED
    assert w.sink.of(Warned) == []


async def test_both_files_go_where_the_copy_cannot_be_published() -> None:
    w = world()
    w.store.fails = True
    assert await save(w) is CheckpointOutcome.STORE_FAILED
    assert len(w.files.deleted) == 2
    assert w.files.made[0] in w.files.deleted


async def test_both_files_go_where_the_copy_cannot_be_made_durable() -> None:
    w = world()
    w.files.durable = FileCheck("cannot read file")
    assert await save(w) is CheckpointOutcome.STORE_FAILED
    assert len(w.files.deleted) == 2


async def test_the_copy_is_nobodys_orphan_while_it_is_made() -> None:
    w = world()
    seen: list[set[str]] = []
    w.files.durable = lambda: (seen.append(set(w.checkpointer.names_in_flight())), FileCheck())[1]
    await save(w)
    assert set(w.files.made) <= seen[0]
    assert len(seen[0]) == 2
