"""Restores that succeed and help nobody: believed by proof only, given up, said once, tried again."""

from __future__ import annotations

from pathlib import Path

from kvproxy.telemetry.events import RestoreProvedIneffective, SnapshotInvalidated, Warned
from tests.support.proxy import House, house
from tests.support.talk import Talk


async def rounds(here: House, *talks: Talk, count: int = 1) -> None:
    for _ in range(count):
        for talk in talks:
            assert (await here.proxy.turn(talk)).status == 200
            await here.proxy.at_rest()


async def persistence(here: House) -> tuple[str, str]:
    status = (await here.proxy.status())["servers"][0]["persistence"]
    return status["mode"], status["reason"]


async def test_restoring_is_given_up_after_three_that_gave_nothing_and_said_once(tmp_path: Path) -> None:
    async with house(tmp_path, useless_restores=True) as here:
        a, b, c = Talk("alpha"), Talk("beta"), Talk("gamma")
        await rounds(here, a, b, c, count=2)
        assert len(here.proxy.heard(RestoreProvedIneffective)) == 3
        mode, reason = await persistence(here)
        assert mode == "off"
        assert "reuse nothing" in reason
        here.forget_calls()
        await rounds(here, a, b, c)
        assert "restore" not in {deed for deed, _ in here.deeds}
        assert len(here.proxy.heard(Warned)) == 1
        assert here.proxy.heard(SnapshotInvalidated) == []


async def test_it_is_tried_again_in_the_next_life_of_the_server_with_what_was_saved_since(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, useless_restores=True) as here:
        a, b, c = Talk("alpha"), Talk("beta"), Talk("gamma")
        await rounds(here, a, b, c, count=3)
        here.fake.faults.useless_restores = False
        await here.fake.restart()
        back = await here.proxy.turn(a)
        assert back.outcome == "restored"
        assert back.reused > back.computed
        assert (await persistence(here))[0] == "plain"


async def test_clients_that_go_another_way_now_and_then_change_nothing(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a, b = Talk("alpha"), Talk("beta")
        await rounds(here, a, b, count=4)
        assert (await persistence(here)) == ("plain", "")
        assert here.proxy.heard(RestoreProvedIneffective) == []
