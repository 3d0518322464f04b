from __future__ import annotations

import asyncio
from dataclasses import replace

from kvproxy.upstream.facts import Persistence, PersistenceMode, ServerState
from kvproxy.upstream.obstruction import Obstruction
from kvproxy.upstream.replies import ActionFailure, Fault, Props
from tests.support.fakes_core import settle
from tests.unit.upstream.test_watch import OTHER, UNREACHABLE
from tests.unit.upstream.test_watch import Room as WatchRoom

FULL_DISK = "the state directory is gone"
PLAIN = Persistence(PersistenceMode.PLAIN)


class Room(WatchRoom):
    def __init__(self) -> None:
        super().__init__()
        self.obstruction = Obstruction(self.watch._p, self.watch)

    @property
    def mode(self) -> tuple[str, str]:
        return self.facts.persistence.mode, self.facts.persistence.reason


async def met() -> Room:
    room = Room()
    await room.ask()
    room.log.clear()
    return room


async def test_an_obstacle_switches_persistence_off_for_its_reason_and_its_end_on_again() -> None:
    room = await met()
    epoch = room.epoch
    await room.obstruction.set(FULL_DISK)
    assert (room.mode, room.facts.state, room.facts.reason) == (
        ("off", FULL_DISK),
        ServerState.DEGRADED,
        FULL_DISK,
    )
    await room.obstruction.set("another")
    assert room.mode == ("off", "another")
    await room.obstruction.set("")
    assert (room.facts.persistence, room.facts.state) == (PLAIN, ServerState.HEALTHY)
    assert (room.epoch, room.grants, room.log) == (epoch, True, []), "nothing is forgotten, nobody asked"


async def test_a_life_that_began_under_an_obstacle_is_asked_what_it_allows_once_that_is_gone() -> None:
    room = await met()
    await room.obstruction.set(FULL_DISK)
    await room.ask(OTHER)
    assert room.mode == ("off", FULL_DISK)
    room.log.clear()
    await room.obstruction.set("")
    assert (room.facts.persistence, room.log) == (PLAIN, ["supported?"])


async def test_a_server_that_cannot_save_anyway_keeps_its_own_reason() -> None:
    room = Room()
    room.server.answer("supported", ActionFailure(Fault.UNSUPPORTED, "", 501))
    await room.ask()
    before = room.mode
    await room.obstruction.set(FULL_DISK)
    assert room.mode == before
    await room.obstruction.set("")
    assert room.mode == before


async def test_what_showed_itself_before_is_still_known_afterwards() -> None:
    room = await met()
    room.watch.findings.found_unable(room.table.epoch, "nothing is reused", still_saves=True)
    await room.obstruction.set(FULL_DISK)
    assert room.mode == ("off", FULL_DISK)
    await room.obstruction.set("")
    assert room.facts.persistence == Persistence(PersistenceMode.OFF, "nothing is reused", still_saves=True)


async def test_a_server_that_is_gone_meanwhile_is_still_gone() -> None:
    room = await met()
    room.line = False
    await room.ask(UNREACHABLE)
    await room.obstruction.set(FULL_DISK)
    assert room.facts.state is ServerState.UNREACHABLE
    await room.obstruction.set("")
    assert (room.facts.state, room.facts.persistence) == (ServerState.UNREACHABLE, PLAIN)


async def goes_while_met(room: Room, props: Props) -> None:
    """An obstacle that goes while a new life, of `props`, is being met."""
    room.watch._p.introduction._obstacle = lambda: room.standing.obstacle
    await room.obstruction.set(FULL_DISK)
    gate: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    room.server.answer("meta", gate)
    asking = asyncio.ensure_future(room.ask(props))
    await settle()
    await room.obstruction.set("")
    gate.set_result({"n_vocab": 100})
    await asking


async def test_an_obstacle_that_goes_while_a_new_life_is_being_met_is_gone_for_it_too() -> None:
    room = await met()
    await goes_while_met(room, OTHER)
    assert (room.facts.props, room.facts.persistence) == (OTHER, PLAIN)


async def test_one_that_sleeps_is_asked_once_it_wakes() -> None:
    room = await met()
    asleep = replace(OTHER, is_sleeping=True)
    await goes_while_met(room, asleep)
    assert (room.facts.props, room.facts.persistence.mode) == (asleep, PersistenceMode.UNKNOWN)
    await room.ask(OTHER)
    assert room.facts.persistence == PLAIN
