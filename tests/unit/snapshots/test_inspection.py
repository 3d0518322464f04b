from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvproxy.identifiers import SessionKey
from kvproxy.snapshots import inspection as module
from kvproxy.snapshots.checks import Sight
from kvproxy.snapshots.inspection import BACK, Inspection
from kvproxy.snapshots.manifest import Manifest
from kvproxy.telemetry.events import Warned
from tests.support.fakes_core import A, B, FakeFiles, FakeStore, Sink, generation_of, manifest_of, settle


class Room:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.files = FakeFiles(self.log)
        self.store = FakeStore(self.log)
        self.sink = Sink()
        self.obstacles: list[str] = []
        self.looks = 0
        self.gone: list[SessionKey] = []
        self.opening = ""
        self.inspection = Inspection(
            cast(Any, self.store),
            cast(Any, self.files),
            self.sink,
            open_state=self._open,
            on_obstacle=self._note,
            look_for_room=self._look,
            on_gone=self.gone.append,
        )

    async def _open(self) -> str:
        self.log.append("open")
        self.store.is_open = not self.opening
        return self.opening

    async def _look(self) -> None:
        self.looks += 1

    async def _note(self, obstacle: str) -> None:
        self.obstacles.append(obstacle)

    def keep(self, manifest: Manifest) -> Manifest:
        self.store.index.put(manifest)
        return manifest

    def told(self) -> list[tuple[str, str]]:
        return [(event.message, event.code) for event in self.sink.of(Warned)]


async def test_nothing_is_said_while_everything_is_as_it_should_be() -> None:
    room = Room()
    room.keep(manifest_of(A))
    for _ in range(2):
        await room.inspection.run_once()
    assert (room.told(), room.obstacles, room.log) == ([], [], [])
    assert room.looks == 2


async def test_a_file_that_is_gone_makes_its_snapshot_invalid_and_no_other() -> None:
    room = Room()
    gone = room.keep(manifest_of(A, generation_of(), generation_of()))
    other = room.keep(manifest_of(B))
    room.files.sight = Sight(wrong={gone.current.name: "file is missing"})
    await room.inspection.run_once()
    found = room.store.find(A, gone.fingerprint)
    assert found is not None
    assert found.current.invalid_reason == "file is missing"
    assert found.previous is not None
    assert found.previous.is_valid
    assert room.store.find(B, other.fingerprint) == other


async def test_whose_newest_file_is_gone_has_work_that_is_not_saved() -> None:
    room = Room()
    newest, older = room.keep(manifest_of(A)), room.keep(manifest_of(B, generation_of(), generation_of()))
    assert older.previous is not None
    room.files.sight = Sight(
        wrong={newest.current.name: "file is missing", older.previous.name: "file is missing"}
    )
    await room.inspection.run_once()
    assert room.gone == [A]


async def test_what_is_invalid_already_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room()
    room.keep(manifest_of(A, generation_of(invalid_reason="damaged")))
    kept = room.keep(manifest_of(B))
    seen: list[object] = []

    async def at_sight(generations: Any) -> Sight:
        seen.extend(generations)
        return Sight()

    monkeypatch.setattr(room.files, "at_sight", at_sight)
    await room.inspection.run_once()
    assert seen == [kept.current]


async def test_a_directory_that_cannot_be_used_condemns_nothing_and_is_told_until_it_is_back() -> None:
    room = Room()
    kept = room.keep(manifest_of(A))
    room.files.sight = Sight("/kv: No such file or directory")
    for _ in range(2):
        await room.inspection.run_once()
    fault = "snapshot_dir cannot be used: /kv: No such file or directory"
    assert room.obstacles == [fault]
    assert room.told() == [(f"nothing is saved or restored: {fault}", "KV_METADATA_IO")]
    room.files.sight = Sight()
    await room.inspection.run_once()
    assert room.obstacles == [fault, ""]
    assert room.told()[1:] == [(BACK, "")]
    assert room.store.find(A, kept.fingerprint) == kept


async def test_a_state_directory_that_is_no_longer_what_it_was_comes_first() -> None:
    room = Room()
    room.store.fault = "state directory is gone"
    room.files.sight = Sight("/kv: gone too")
    await room.inspection.run_once()
    assert room.obstacles == ["state directory is gone"]


async def test_one_that_could_not_be_opened_is_tried_again_until_it_can() -> None:
    room = Room()
    room.store.is_open = False
    room.opening = "cannot create state directory"
    for _ in range(2):
        await room.inspection.run_once()
    room.opening = ""
    for _ in range(2):
        await room.inspection.run_once()
    assert room.log == ["open"] * 3
    assert room.obstacles == ["cannot create state directory", ""]


async def test_it_looks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND_SECONDS", 0.0)
    room = Room()
    running = asyncio.ensure_future(room.inspection.run())
    await settle()
    room.store.fault = "gone"
    await settle()
    running.cancel()
    assert room.obstacles == ["gone"]
