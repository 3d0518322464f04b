from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvproxy.identifiers import SlotId
from kvproxy.slots.living import decode
from kvproxy.slots.settling import Settling
from kvproxy.upstream import living as module
from kvproxy.upstream.facts import ServerState
from kvproxy.upstream.living import REST_SECONDS, LivingSlots
from tests.support.fakes_core import MAIN, PROPS, UNREACHABLE, A, World, idle, stay

S0 = SlotId(0)
SEEN = (idle(0, task=7, tokens=900), idle(1))


class Home(World):
    """A rests in slot 0, and the server shows its task."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path / "living.json"
        self.falls_asleep = False
        self.judged: list[float] = []
        self.server.answer("slots", SEEN)
        self.living = self.reborn()

    def reborn(self) -> LivingSlots:
        return LivingSlots(
            self.path,
            MAIN,
            cast(Any, self.server),
            self.standing,
            self.table,
            self.desk,
            self.registry,
            self.clock,
            self._ask,
            lambda infos, began: self.judged.append(began),
        )

    async def _ask(self) -> None:
        if self.falls_asleep:
            self.standing.set(state=ServerState.SLEEPING)

    async def keep(self) -> list[tuple[int, int]]:
        """Slots and tasks that are written down."""
        self.clock.advance(1)
        await self.living.keep()
        return self.written

    @property
    def written(self) -> list[tuple[int, int]]:
        found = decode(self.path.read_bytes()) if self.path.exists() else None
        return [] if found is None else [(one.slot, one.task) for one in found.slots]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path)
    made.house(0, stay(A))
    return made


async def test_it_looks_once_and_writes_once_what_rests(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    write = module.write_atomic
    monkeypatch.setattr(module, "write_atomic", lambda path, data: (writes.append(data), write(path, data)))
    for _ in range(3):
        assert await home.keep() == [(0, 7)]
    assert home.log.count("slots") == 1
    assert len(writes) == 1


async def test_a_request_or_a_save_that_may_have_rewound_it_makes_another_look_necessary(home: Home) -> None:
    await home.keep()
    home.table.start_saving(S0, home.table.epoch)
    assert await home.keep() == [(0, 7)]
    assert home.log.count("slots") == 1
    home.table.save_ended(S0, home.table.epoch)
    await home.keep()
    assert home.log.count("slots") == 2
    home.house(0, stay(A, revision=2))
    await home.keep()
    assert home.log.count("slots") == 3


async def test_a_look_that_began_before_the_answer_ended_tells_nothing(home: Home) -> None:
    home.clock.advance(1)
    began = home.clock.now()
    home.house(0, stay(A, revision=2))
    home.table.seen(SEEN, began)
    assert home.table.view(S0).sight is None


async def test_a_server_that_sleeps_is_not_woken(home: Home) -> None:
    home.falls_asleep = True
    assert await home.keep() == []
    assert "slots" not in home.log


async def test_nobody_looks_while_a_dropped_request_is_to_be_noticed(home: Home) -> None:
    home.table.serve(SlotId(1), home.table.epoch, None)
    home.table.broke_off(SlotId(1), home.table.epoch, Settling(SlotId(1), was_seen=True))
    await home.keep()
    assert "slots" not in home.log


async def test_a_server_that_has_no_time_to_answer_is_left_alone_for_a_while(home: Home) -> None:
    home.server.answer("slots", UNREACHABLE)
    for _ in range(3):
        await home.keep()
    assert home.log.count("slots") == 1
    home.clock.advance(REST_SECONDS)
    await home.keep()
    assert home.log.count("slots") == 2


async def test_a_slot_that_tells_no_task_is_not_looked_at_again_and_again(home: Home) -> None:
    home.server.answer("slots", (idle(0), idle(1)))
    for _ in range(3):
        assert await home.keep() == []
    assert home.log.count("slots") == 1


async def test_what_is_proven_lives_on_and_the_registry_knows_it(home: Home) -> None:
    await home.keep()
    home.registry.forget(A)
    home.live()
    again = home.reborn()
    await again.load()
    again.readopt(PROPS, SEEN)
    assert home.occupant() == "a" * 12
    session = home.registry.find(A)
    assert session is not None
    assert session.was_resident
    assert session.revision == 1


async def test_only_the_first_look_of_a_life_takes_up_anything(home: Home) -> None:
    await home.keep()
    again = home.reborn()
    await again.load()
    home.live()
    again.readopt(PROPS, ())
    again.readopt(PROPS, SEEN)
    assert home.occupant() is None


async def test_a_slot_that_is_in_use_already_is_left_to_whoever_has_it(home: Home) -> None:
    await home.keep()
    again = home.reborn()
    await again.load()
    home.live()
    home.table.serve(S0, home.table.epoch, None)
    again.readopt(PROPS, SEEN)
    assert home.state() == "serving"


async def test_what_was_left_is_not_written_over_before_it_was_compared(home: Home) -> None:
    await home.keep()
    left = home.path.read_bytes()
    again = home.reborn()
    await again.load()
    home.table.lose(S0, home.table.epoch)
    await again.write()
    assert home.path.read_bytes() == left
    again.readopt(replace(PROPS, marker="<__media_2__>"), ())
    await again.write()
    assert home.path.read_bytes() != left


async def test_before_a_restore_the_record_is_gone_and_comes_back_after(home: Home) -> None:
    await home.keep()
    await home.living.forget(SlotId(1))
    assert home.written == [(0, 7)]
    await home.living.forget(S0)
    assert not home.path.exists()
    assert await home.keep() == [(0, 7)]


async def test_a_record_under_way_is_on_disk_before_it_is_forgotten(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    await home.keep()
    home.table.checkpointed(S0, home.table.epoch, A, stay(A).revision)
    await asyncio.gather(home.living.write(), home.living.forget(S0))
    assert not home.path.exists()


async def test_a_record_that_cannot_be_written_leaves_no_old_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    await home.keep()
    home.house(0, stay(A, revision=2))
    monkeypatch.setattr(module, "write_atomic", fails)
    await home.keep()
    assert not home.path.exists()


async def test_a_session_that_forbade_the_disk_is_not_on_it(home: Home) -> None:
    home.session(A, may_persist=False)
    assert await home.keep() == []
    assert home.path.exists()


async def test_a_process_without_a_marker_of_its_own_is_not_written_down(home: Home) -> None:
    home.standing.set(props=replace(PROPS, marker="<__media__>"))
    await home.keep()
    assert not home.path.exists()
