"""Saves that go wrong: the request that needs the slot goes on, nothing false is ever published."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvproxy.checkpoint.outcome import CheckpointOutcome
from kvproxy.snapshots.files import SharedDirectory
from kvproxy.telemetry.events import CheckpointEnded, PersistenceRecovered, PersistenceTripped, Warned
from kvproxy.verdict import verdict_line
from tests.fakes.faults import Failure, Faults
from tests.fakes.llama_server import FakeLlamaServer
from tests.support.proxy import House, KvProxy, house, make_settings
from tests.support.talk import Talk

IMPATIENT: dict[str, Any] = {"checkpoint": {"timeout_seconds": 1}, "restore": {"timeout_seconds": 1}}


def endings(here: House) -> list[str]:
    return [event.outcome for event in here.proxy.heard(CheckpointEnded)]


async def counted(here: House, line: str) -> float:
    """The value of one line of the metrics."""
    text = (await here.proxy.get("/metrics")).raw.decode()
    return float(next(row.rpartition(" ")[2] for row in text.splitlines() if row.startswith(line + " ")))


def planned(failure: Failure) -> Callable[[Faults], None]:
    return lambda faults: faults.fail("save", failure, times=1)


def miscounted(delta: int) -> Callable[[Faults], None]:
    return lambda faults: setattr(faults, "n_saved_delta", delta)


BAD_SAVES: dict[str, tuple[Callable[[Faults], None], CheckpointOutcome]] = {
    "failed": (planned(Failure.ERROR), CheckpointOutcome.FAILED),
    "cut off": (planned(Failure.CLOSE), CheckpointOutcome.UNREACHABLE),
    "answer lost": (planned(Failure.LOST_ANSWER), CheckpointOutcome.UNREACHABLE),
    "answer garbled": (planned(Failure.GARBAGE), CheckpointOutcome.FAILED),
    "disk full": (planned(Failure.FULL_DISK), CheckpointOutcome.FAILED),
    "disk full, unnoticed": (planned(Failure.SHORT_FILE), CheckpointOutcome.IMPLAUSIBLE),
    "too few tokens": (miscounted(-100), CheckpointOutcome.IMPLAUSIBLE),
    "too many tokens": (miscounted(100), CheckpointOutcome.IMPLAUSIBLE),
    "another slot": (lambda faults: setattr(faults, "id_slot_delta", 1), CheckpointOutcome.FAILED),
}


@pytest.mark.parametrize(("fault", "ending"), BAD_SAVES.values(), ids=BAD_SAVES)
async def test_a_save_that_fails_costs_a_cold_prompt_and_nothing_else(
    tmp_path: Path, fault: Callable[[Faults], None], ending: CheckpointOutcome
) -> None:
    async with house(tmp_path) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        fault(here.fake.faults)
        other = await here.proxy.turn(b)
        assert (other.status, other.told) == (200, ("cold", "new-session"))
        assert endings(here) == [ending]
        assert here.manifests() == []
        here.fake.faults.n_saved_delta = here.fake.faults.id_slot_delta = 0
        back = await here.proxy.turn(a)
        assert back.outcome == "cold"
        assert back.reason == "evicted"
        label = f'kvproxy_checkpoints_total{{outcome="{ending.value}",server="main",trigger="switch"}}'
        assert await counted(here, label) == 1
        await here.proxy.at_rest()
        assert len(here.files) <= 2


async def test_a_save_of_too_few_tokens_is_not_believed_where_only_the_server_sees_the_file(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, shared=False) as here:
        a = Talk("alpha")
        await here.proxy.turn(a)
        here.fake.faults.n_saved_delta = -100
        await here.proxy.turn(Talk("beta"))
        assert endings(here) == [CheckpointOutcome.IMPLAUSIBLE]
        assert (await here.proxy.turn(a)).told == ("cold", "evicted")


async def test_the_files_of_saves_that_failed_are_removed(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.proxy.turn(Talk("alpha"))
        here.fake.faults.fail("save", Failure.SHORT_FILE, times=1)
        await here.proxy.turn(Talk("beta"))
        await here.proxy.at_rest()
        assert here.files == []


async def test_a_save_that_hangs_holds_a_conversation_no_longer_than_its_time(tmp_path: Path) -> None:
    async with house(tmp_path, **IMPATIENT) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        await here.proxy.admin("POST", "flush")
        await here.proxy.turn(a)
        here.fake.faults.fail("save", Failure.HANG, times=1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        other = await here.proxy.turn(b)
        assert other.told == ("cold", "new-session")
        assert 0.9 < loop.time() - began < 5
        assert here.proxy.slot_states == ["quarantined"]
        assert endings(here)[-1] == CheckpointOutcome.TIMED_OUT
        assert (await here.proxy.turn(b)).status == 200
        await here.fake.restart()
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_what_a_late_save_writes_is_never_published(tmp_path: Path) -> None:
    """It runs when another conversation is in the slot, and would hold that one's tokens."""
    async with house(tmp_path, **IMPATIENT) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        await here.proxy.admin("POST", "flush")
        published = here.files
        await here.proxy.turn(a)
        here.fake.faults.late_actions = 2.5
        assert (await here.proxy.turn(b)).outcome == "cold"
        here.fake.faults.late_actions = 0
        await here.proxy.until(lambda: here.proxy.slot_states == ["idle"])
        await here.proxy.at_rest()
        assert here.files == published
        back = await here.proxy.turn(a)
        assert back.told == ("restored", None)
        assert (await here.proxy.turn(b)).told[0] == "cold"


async def test_an_empty_save_proves_that_the_slot_was_cleared_and_nothing_is_published(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        here.fake.slots[0].hold([])
        assert (await here.proxy.turn(b)).status == 200
        assert endings(here) == [CheckpointOutcome.EMPTY]
        assert here.manifests() == []
        await here.proxy.until(lambda: here.proxy.runtime.standing.facts.is_volatile)
        assert (await here.proxy.turn(a)).told == ("cold", "evicted")


async def test_saves_that_fail_in_a_row_open_the_breaker_which_closes_again_by_itself(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, failure={"cooldown_seconds": 0.4}) as here:
        talks = [Talk(f"t{n}") for n in range(6)]
        await here.proxy.turn(talks[0])
        await here.proxy.admin("POST", "flush")
        await here.proxy.turn(talks[0])
        here.fake.faults.fail("save", Failure.ERROR)
        for talk in talks[1:4]:
            assert (await here.proxy.turn(talk)).status == 200
        assert len(here.proxy.heard(PersistenceTripped)) == 1
        assert (await here.proxy.status())["servers"][0]["breaker"] == "open"
        assert await counted(here, 'kvproxy_breaker_state{server="main",state="open"}') == 1
        here.forget_calls()
        blocked = await here.proxy.turn(talks[4])
        assert (blocked.told, here.deeds) == (("cold", "new-session"), [])
        assert (await here.proxy.turn(talks[0])).told == ("cold", "breaker-open")
        here.fake.faults.planned.clear()
        await asyncio.sleep(0.45)
        await here.proxy.turn(talks[5])
        await here.proxy.until(lambda: here.proxy.heard(PersistenceRecovered))
        assert (await here.proxy.status())["servers"][0]["breaker"] == "closed"
        assert (await here.proxy.turn(talks[4])).outcome == "cold"
        assert (await here.proxy.turn(talks[5])).told == ("restored", None)


async def test_a_strict_proxy_refuses_rather_than_lose_what_it_cannot_save(tmp_path: Path) -> None:
    async with house(tmp_path, failure={"strict": True}) as here:
        a, b = Talk("alpha"), Talk("beta")
        await here.proxy.turn(a)
        here.fake.faults.fail("save", Failure.ERROR, times=1)
        refused = await here.proxy.turn(b)
        assert (refused.status, refused.code) == (503, "KV_SAVE_FAILED")
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await here.proxy.turn(a)).told == ("resident", None)
        assert (await here.proxy.turn(b)).status == 200


async def test_a_state_directory_that_takes_nothing_costs_snapshots_and_one_warning_each(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as here:
        shut(here.state_dir / "manifests")
        for _ in range(2):
            for name in ("alpha", "beta"):
                answer = await here.proxy.turn(Talk(name))
                assert (answer.status, answer.outcome) == (200, "cold")
        await here.proxy.at_rest()
        assert set(endings(here)) == {CheckpointOutcome.STORE_FAILED}
        assert here.proxy.heard(Warned) == []  # the save's own line tells of it
        assert here.files == []


async def test_a_save_directory_that_is_not_the_servers_costs_snapshots_and_answers_nobody_wrong(
    tmp_path: Path,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    options: dict[str, Any] = {"upstream": {"snapshot_dir": str(elsewhere)}}
    async with house(tmp_path, shared=False, **options) as here:
        for _ in range(3):
            for name in ("alpha", "beta"):
                answer = await here.proxy.turn(Talk(name))
                assert (answer.status, answer.outcome) == (200, "cold")
        assert endings(here)[0] == CheckpointOutcome.IMPLAUSIBLE
        assert here.manifests() == []
        assert len(here.proxy.heard(PersistenceTripped)) == 1


async def test_a_save_directory_that_does_not_exist_is_told_at_the_start(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    async with house(tmp_path, shared=False, upstream={"snapshot_dir": str(missing)}) as here:
        (warning,) = here.proxy.heard(Warned)
        assert "snapshot_dir" in warning.message
        assert str(missing) in warning.message
        assert (await here.proxy.turn(Talk("alpha"))).status == 200


async def test_a_state_directory_that_cannot_be_made_costs_snapshots_and_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    async with FakeLlamaServer(slots=1, slot_dir=tmp_path) as fake:
        async with KvProxy(make_settings(fake.base_url, tmp_path / "file" / "state")) as proxy:
            await proxy.ready()
            for name in ("alpha", "beta", "alpha"):
                answer = await proxy.turn(Talk(name))
                assert (answer.status, answer.outcome) == (200, "cold")
            assert (await proxy.admin("POST", "gc")).status == 200
            (warning,) = [one for one in proxy.heard(Warned) if one.code == "KV_METADATA_IO"]
            assert "set state_dir" in warning.message
            persistence = (await proxy.status())["servers"][0]["persistence"]
            assert persistence["mode"] == "off"
            assert persistence["reason"] in warning.message
            assert verdict_line(proxy.runtime)[0] == logging.INFO


def shut(directory: Path) -> None:
    """A directory that not even root can write into: a file stands in its place."""
    directory.rmdir()
    directory.write_bytes(b"")


async def test_a_disk_without_room_costs_no_save_and_nobodys_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_: SharedDirectory) -> int:
        return 1000

    async with house(tmp_path) as here:
        a, b = Talk("alpha"), Talk("beta")
        monkeypatch.setattr(SharedDirectory, "free_bytes", full)
        for talk in (a, b, a, b):
            assert (await here.proxy.turn(talk)).status == 200
        assert endings(here) == [CheckpointOutcome.NO_ROOM] * 3
        assert "save" not in {deed for deed, _ in here.deeds}
        assert len(here.proxy.heard(Warned)) == 1
        status = await here.proxy.status()
        (server,) = status["servers"]
        assert (server["state"], server["persistence"]["mode"]) == ("degraded", "plain")
        assert "are free where the snapshots lie" in server["reason"]
        assert server["persistence"]["reason"] == server["reason"]
        assert (status["stats"]["saves_without_room"], status["stats"]["save_failures"]) == (3, 0)
        ready = await here.proxy.admin("GET", "readyz")
        assert (ready.status, ready.body) == (200, {"status": "degraded", "reason": server["reason"]})
        text = (await here.proxy.get("/metrics")).raw.decode()
        assert 'kvproxy_disk_lacks_room{server="main"} 1.0' in text
        assert 'kvproxy_checkpoints_total{outcome="no_room",server="main",trigger="switch"} 3.0' in text
        monkeypatch.undo()
        await here.proxy.turn(a)
        await here.proxy.at_rest()
        assert endings(here)[-1] == CheckpointOutcome.PUBLISHED
        (server,) = (await here.proxy.status())["servers"]
        assert (server["state"], server["reason"], server["persistence"]["reason"]) == ("healthy", "", "")
