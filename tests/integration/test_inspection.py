"""What is kept is shown as it is: files and directories that went away or came back are seen unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvproxy.snapshots import inspection
from kvproxy.telemetry.events import CheckpointEnded, PersistenceTripped, SnapshotInvalidated, Warned
from tests.fakes.llama_server import FakeLlamaServer
from tests.support.proxy import House, KvProxy, house, make_settings
from tests.support.talk import Talk


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "ROUND_SECONDS", 0.02)


async def saved(here: House, name: str) -> Talk:
    talk = Talk(name)
    await here.proxy.turn(talk)
    await here.proxy.admin("POST", "flush")
    return talk


async def snapshots(here: House) -> list[bool]:
    shown = (await here.proxy.admin("GET", "snapshots")).body["snapshots"]
    return [one["valid"] for snapshot in shown for one in snapshot["generations"]]


def persistence(proxy: KvProxy) -> Any:
    return proxy.runtime.standing.facts.persistence


async def test_a_file_that_was_deleted_by_hand_is_shown_as_invalid_without_being_asked_for(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as here:
        await saved(here, "alpha")
        assert await snapshots(here) == [True]
        here.files[0].unlink()
        await here.proxy.until(lambda: here.proxy.heard(SnapshotInvalidated))
        assert await snapshots(here) == [False]
        status = await here.proxy.status()
        assert (status["snapshots"]["valid"], status["snapshots"]["invalid"]) == (0, 1)
        assert here.proxy.heard(SnapshotInvalidated)[0].reason == "file is missing"


async def test_a_conversation_whose_file_was_deleted_is_saved_again_before_it_loses_its_slot(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, slots=1) as here:
        talk = await saved(here, "alpha")
        here.files[0].unlink()
        await here.proxy.until(lambda: here.proxy.heard(SnapshotInvalidated))
        (slot,) = (await here.proxy.admin("GET", "slots")).body["slots"]
        assert slot["dirty"]

        assert (await here.proxy.turn(Talk("beta"))).told == ("cold", "new-session")
        assert (await here.proxy.turn(talk)).told == ("restored", None)


async def test_a_snapshot_directory_that_is_away_for_a_while_costs_no_snapshot(tmp_path: Path) -> None:
    async with house(tmp_path, slots=1) as here:
        talk = await saved(here, "alpha")
        here.slot_dir.rename(tmp_path / "away")
        await here.proxy.until(lambda: not persistence(here.proxy).is_on)
        (server,) = (await here.proxy.status())["servers"]
        assert (server["state"], server["persistence"]["mode"]) == ("degraded", "off")
        assert "snapshot_dir cannot be used" in server["persistence"]["reason"]
        assert (await here.proxy.turn(Talk("beta"))).told == ("cold", "new-session")
        assert (await here.proxy.turn(talk)).told == ("cold", "persistence-off")
        assert await snapshots(here) == [True]

        (tmp_path / "away").rename(here.slot_dir)
        await here.proxy.until(lambda: persistence(here.proxy).is_on)

        await here.fake.restart()
        assert (await here.proxy.turn(talk)).told == ("restored", None)
        assert here.proxy.heard(SnapshotInvalidated) == []


@pytest.mark.parametrize("which", ["slot_dir", "state_dir"])
async def test_what_fails_while_a_directory_is_away_is_not_held_against_the_server_afterwards(
    tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "ROUND_SECONDS", 3600.0)  # nobody has looked yet
    failure = {"max_consecutive_failures": 2, "cooldown_seconds": 3600}
    async with house(tmp_path, slots=1, failure=failure) as here:
        directory: Path = getattr(here, which)
        talk = await saved(here, "alpha")
        directory.rename(tmp_path / "away")
        for _ in range(3):
            await here.proxy.turn(talk)
            await here.proxy.admin("POST", "flush")
            ended = here.proxy.heard(CheckpointEnded)[-1]
            assert (ended.outcome, str(directory) in ended.detail) == ("store_failed", True)
        assert here.proxy.heard(PersistenceTripped) == []

        (tmp_path / "away").rename(directory)

        await here.proxy.turn(talk)
        await here.proxy.admin("POST", "flush")
        assert here.proxy.heard(CheckpointEnded)[-1].outcome == "published"


async def test_a_state_directory_that_goes_away_is_told_and_used_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as here:
        talk = await saved(here, "alpha")
        here.state_dir.rename(tmp_path / "away")
        await here.proxy.until(lambda: not persistence(here.proxy).is_on)
        assert str(here.state_dir) in persistence(here.proxy).reason
        assert (await here.proxy.turn(talk)).told == ("resident", None)

        (tmp_path / "away").rename(here.state_dir)
        await here.proxy.until(lambda: persistence(here.proxy).is_on)

        await here.proxy.turn(talk)
        await here.proxy.admin("POST", "flush")
        assert here.proxy.heard(CheckpointEnded)[-1].outcome == "published"
        assert [event.code for event in here.proxy.heard(Warned)] == ["KV_METADATA_IO", ""]


async def test_one_that_cannot_be_used_at_the_start_is_used_as_soon_as_it_can(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    slot_dir = tmp_path / "slots"
    slot_dir.mkdir()
    async with FakeLlamaServer(slots=1, slot_dir=slot_dir) as fake:
        async with KvProxy(make_settings(fake.base_url, blocked / "state", slot_dir)) as before:
            await before.ready()
            await before.turn(kept := Talk("kept"))
            await before.admin("POST", "flush")
        blocked.rename(tmp_path / "aside")
        blocked.write_bytes(b"")
        async with KvProxy(make_settings(fake.base_url, blocked / "state", slot_dir)) as proxy:
            await proxy.ready()
            assert (await proxy.turn(Talk("alpha"))).status == 200
            assert "set state_dir" in persistence(proxy).reason

            blocked.unlink()
            (tmp_path / "aside").rename(blocked)
            await proxy.until(lambda: persistence(proxy).is_on)

            await fake.restart()
            assert (await proxy.turn(kept)).told == ("restored", None)
            assert len(proxy.heard(Warned)) == 2
