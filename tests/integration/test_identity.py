"""Who computed a snapshot: never restored where something else computes, and back when that returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvproxy.telemetry.events import RestoreEnded, ServerReady, Warned
from kvproxy.upstream import late_canary
from tests.support.proxy import House, house
from tests.support.talk import Talk

MISMATCH = ("cold", "fingerprint-mismatch")


async def stored(here: House) -> Talk:
    talk = Talk("alpha")
    await here.proxy.turn(talk)
    await here.proxy.admin("POST", "flush")
    return talk


async def foreign(here: House, slot: int) -> None:
    """Somebody else's request, past kvproxy."""
    body = {"prompt": "somebody else", "id_slot": slot, "n_predict": 2}
    async with aiohttp.ClientSession(here.fake.base_url) as session:
        async with session.post("/completion", json=body) as response:
            assert response.status == 200


async def server_of(here: House) -> Any:
    return (await here.proxy.status())["servers"][0]


async def test_other_weights_of_the_same_name_are_told_by_their_canary(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        talk = await stored(here)
        first = await server_of(here)
        await here.fake.restart(weights="second")
        here.forget_calls()
        assert (await here.proxy.turn(talk)).told == MISMATCH
        assert "restore" not in [deed for deed, _ in here.deeds]
        assert here.proxy.heard(RestoreEnded)[-1].detail.startswith("differs in canary: ")
        (snapshot,) = (await here.proxy.admin("GET", "snapshots")).body["snapshots"]
        assert snapshot["differs_in"] == ["canary"]
        await here.fake.restart(weights="first")
        assert (await here.proxy.turn(talk)).told == ("restored", None)
        assert (await server_of(here))["canary"] == first["canary"]


async def test_the_slot_of_a_canary_is_empty_again(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        assert [slot.tokens for slot in here.fake.slots] == [[], []]
        assert [view.is_blank for view in here.proxy.runtime.table.views()] == [True, True]


async def test_a_kvproxy_that_is_started_again_knows_the_server_whose_slots_are_full(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        talk = await stored(here)
        before = await server_of(here)
        here.forget_calls()
        await here.proxy.restart()
        await here.proxy.ready()
        assert here.completions() == 0
        assert (await server_of(here))["fingerprint"] == before["fingerprint"]
        assert (await here.proxy.turn(talk)).told == ("restored", None)


async def test_a_server_that_cannot_be_asked_is_trusted_with_its_own_snapshots_alone(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await foreign(here, 0)
        (here.state_dir / "canaries.json").unlink()
        await here.proxy.restart()
        await here.proxy.ready()
        assert (await server_of(here))["canary"].startswith("life:")
        talk = await stored(here)
        await here.proxy.turn(Talk("beta"))
        assert (await here.proxy.turn(talk)).told == ("restored", None)
        await here.fake.restart()
        assert (await here.proxy.turn(talk)).told == MISMATCH


async def test_another_build_goes_on_with_the_snapshots_of_the_one_before(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        talk = await stored(here)
        await here.fake.restart(build="b2")
        assert (await here.proxy.turn(talk)).told == ("restored", None)


async def test_it_does_not_where_that_is_not_wanted(tmp_path: Path) -> None:
    async with house(tmp_path, restore={"accept_other_builds": False}) as here:
        talk = await stored(here)
        await here.fake.restart(build="b2")
        assert (await here.proxy.turn(talk)).told == MISMATCH


async def test_a_snapshot_that_another_build_refuses_is_still_good_for_its_own(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        talk = await stored(here)
        await here.fake.restart(build="b2", bytes_per_token=256)
        assert (await here.proxy.turn(talk)).told == ("cold", "restore-failed")
        await here.fake.restart(build="b11434-fake", bytes_per_token=512)
        assert (await here.proxy.turn(talk)).told == ("restored", None)


@pytest.mark.parametrize("kind", ["hybrid", "sliding_window"])
async def test_the_operators_word_on_the_memory_is_shown(tmp_path: Path, kind: str) -> None:
    async with house(tmp_path, upstream={"memory_kind": kind}) as here:
        memory = (await server_of(here))["memory"]
        assert (memory["kind"], memory["may_roll_back"]) == (kind.replace("_", "-"), False)


async def test_somebody_elses_use_of_a_slot_ends_the_stay_there_and_is_told_once(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        alpha, beta = Talk("alpha"), Talk("beta")
        for talk in (alpha, beta):
            await here.proxy.turn(talk)
        await here.proxy.admin("POST", "flush")
        await here.proxy.at_rest()
        await look(here)
        slot = here.fake.slots[0]
        assert slot.words
        await foreign(here, 0)
        await look(here)
        lost = [view.id for view in here.proxy.runtime.table.views() if view.occupancy is None]
        assert lost == [0]
        warned = [event for event in here.proxy.heard(Warned) if "somebody else" in event.message]
        assert len(warned) == 1
        answers = [await here.proxy.turn(talk) for talk in (alpha, beta)]
        assert sorted(answer.told for answer in answers) == [("resident", None), ("restored", None)]
        assert len(here.proxy.heard(ServerReady)) == 1


async def look(here: House) -> None:
    await here.proxy.runtime.probe.look_once()


async def test_adapters_that_are_changed_through_us_are_another_identity_at_once(tmp_path: Path) -> None:
    options = {"adapters": ("/lora.gguf",), "security": {"allow_management": True}}
    async with house(tmp_path, **options) as here:
        talk = await stored(here)
        for scale, told in ((0.5, MISMATCH), (1.0, ("restored", None))):
            changed = await here.proxy.post("/lora-adapters", b'[{"id": 0, "scale": %f}]' % scale)
            assert changed.status == 200
            assert (await here.proxy.turn(talk)).told == told


async def test_a_server_that_was_busy_as_its_life_began_is_asked_again_and_its_snapshots_join_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_canary, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(late_canary, "FIRST_PAUSE_SECONDS", 0.3)
    async with house(tmp_path, slots=2) as here:
        talk = await stored(here)
        first = await server_of(here)
        here.fake.faults.fail("completion", "error", 1)  # the canary's
        await here.fake.restart()
        await here.proxy.ready()
        await here.proxy.until(lambda: len(here.proxy.heard(ServerReady)) == 2)
        assert (await server_of(here))["canary"].startswith("life:")
        assert (await here.proxy.turn(talk)).told == MISMATCH
        await here.proxy.admin("POST", "flush")

        facts = here.proxy.runtime.standing
        await here.proxy.until(lambda: facts.facts.canary == first["canary"])

        await here.proxy.at_rest()
        assert (await server_of(here))["fingerprint"] == first["fingerprint"]
        await here.fake.restart()
        back = await here.proxy.turn(talk)
        assert (back.told, back.reused > back.computed) == (("restored", None), True)


async def test_what_was_computed_under_adapters_of_a_requests_own_is_never_given_to_another(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as here:
        a, own = Talk("alpha"), {"lora": [{"id": 0, "scale": 0.5}]}
        await here.proxy.turn(a, **own)
        assert (await here.proxy.turn(a, **own)).told == ("resident", None)
        here.forget_calls()
        plain = await here.proxy.turn(a)
        assert (plain.outcome, plain.reused) == ("cold", 0)
        assert [deed for deed, _ in here.deeds] == ["erase"]
        assert (await here.proxy.turn(a)).told == ("resident", None)
        await here.proxy.turn(a, **own)
        assert (await here.proxy.turn(a)).told == ("restored", None)
        kept = [one.model for one in here.proxy.runtime.store.all()]
        assert len(kept) == 1
        assert "lora" not in kept[0]
