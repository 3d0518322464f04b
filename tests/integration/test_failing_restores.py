"""Restores that go wrong, and snapshots that are no longer what they were: cold, right, and told why."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvproxy.checkpoint.outcome import RestoreOutcome
from kvproxy.telemetry.events import RestoreEnded, SnapshotInvalidated, Warned
from tests.fakes.faults import Failure, Faults
from tests.support.proxy import House, house
from tests.support.talk import Talk

IMPATIENT: dict[str, Any] = {"checkpoint": {"timeout_seconds": 1}, "restore": {"timeout_seconds": 1}}


def endings(here: House) -> list[str]:
    return [event.outcome for event in here.proxy.heard(RestoreEnded)]


async def stored(here: House, *, slots: int = 1) -> Talk:
    """A conversation that is on disk and no longer in any slot."""
    a = Talk("alpha")
    await here.proxy.turn(a)
    for number in range(slots):
        await here.proxy.turn(Talk(f"other{number}"))
    await here.proxy.at_rest()
    return a


def planned(failure: Failure) -> Callable[[Faults], None]:
    return lambda faults: faults.fail("restore", failure, times=1)


BAD_RESTORES: dict[str, tuple[Callable[[Faults], None], RestoreOutcome]] = {
    "failed": (planned(Failure.ERROR), RestoreOutcome.FAILED),
    "cut off": (planned(Failure.CLOSE), RestoreOutcome.UNREACHABLE),
    "answer lost": (planned(Failure.LOST_ANSWER), RestoreOutcome.UNREACHABLE),
    "answer garbled": (planned(Failure.GARBAGE), RestoreOutcome.FAILED),
    "too few tokens": (lambda faults: setattr(faults, "n_restored_delta", -1), RestoreOutcome.IMPLAUSIBLE),
    "too many tokens": (lambda faults: setattr(faults, "n_restored_delta", 1), RestoreOutcome.IMPLAUSIBLE),
    "another slot": (lambda faults: setattr(faults, "id_slot_delta", 1), RestoreOutcome.FAILED),
    "hanging": (planned(Failure.HANG), RestoreOutcome.TIMED_OUT),
}


@pytest.mark.parametrize(("fault", "ending"), BAD_RESTORES.values(), ids=BAD_RESTORES)
async def test_a_restore_that_fails_costs_a_cold_prompt_and_nothing_else(
    tmp_path: Path, fault: Callable[[Faults], None], ending: RestoreOutcome
) -> None:
    patience = IMPATIENT if ending is RestoreOutcome.TIMED_OUT else {}
    async with house(tmp_path, **patience) as here:
        a = await stored(here)
        await here.proxy.admin("POST", "flush")
        fault(here.fake.faults)
        back = await here.proxy.turn(a)
        assert (back.status, back.told) == (200, ("cold", "restore-failed"))
        assert endings(here) == [ending]
        here.fake.faults.id_slot_delta = here.fake.faults.n_restored_delta = 0
        metrics = (await here.proxy.get("/metrics")).raw.decode()
        assert f'kvproxy_restores_total{{outcome="{ending.value}",server="main"}} 1.0' in metrics
        assert (await here.proxy.turn(a)).status == 200
        # The server forgets what hangs only when it ends.
        if ending is RestoreOutcome.TIMED_OUT:
            await here.fake.restart()


async def test_a_restore_that_hangs_leaves_the_snapshot_for_the_next_life(tmp_path: Path) -> None:
    async with house(tmp_path, **IMPATIENT) as here:
        a = await stored(here)
        here.fake.faults.fail("restore", Failure.HANG, times=1)
        assert (await here.proxy.turn(a)).outcome == "cold"
        assert here.proxy.slot_states == ["quarantined"]
        assert (await here.proxy.turn(Talk("beta"))).status == 200
        await here.fake.restart()
        assert (await here.proxy.turn(a)).status == 200


async def test_a_file_that_only_the_server_sees_and_refuses_is_replaced_at_the_next_save(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, shared=False) as here:
        a = await stored(here)
        (damaged,) = here.files
        damaged.write_bytes(damaged.read_bytes()[:-500])
        assert (await here.proxy.turn(a)).told == ("cold", "restore-failed")
        await here.proxy.turn(Talk("other0"))
        assert (await here.proxy.turn(a)).told == ("restored", None)


def truncated(by: Callable[[int], int]) -> Callable[[House, Path], None]:
    def damage(here: House, path: Path) -> None:
        os.truncate(path, by(path.stat().st_size))

    return damage


def foreign(here: House, path: Path) -> None:
    (other,) = (file for file in here.files if file != path)
    shutil.copyfile(other, path)


DAMAGES: dict[str, Callable[[House, Path], None]] = {
    "deleted": lambda here, path: path.unlink(),
    "short by one byte": truncated(lambda size: size - 1),
    "half": truncated(lambda size: size // 2),
    "empty": truncated(lambda size: 0),
    "another session's": foreign,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
async def test_a_damaged_file_is_found_out_before_the_server_reads_it(
    tmp_path: Path, damage: Callable[[House, Path], None]
) -> None:
    async with house(tmp_path) as here:
        a = await stored(here)
        (path,) = here.files
        await here.proxy.turn(Talk("beta"))
        await here.proxy.at_rest()
        damage(here, path)
        here.forget_calls()
        back = await here.proxy.turn(a)
        assert (back.status, back.told) == (200, ("cold", "snapshot-invalid"))
        assert "restore" not in {deed for deed, _ in here.deeds}
        assert here.fake.aborts == 0
        assert len(here.proxy.heard(SnapshotInvalidated)) == 1


async def test_the_generation_before_is_restored_where_the_newest_file_is_damaged(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = await stored(here)
        await here.proxy.turn(a)
        before = set(here.files)
        await here.proxy.turn(Talk("beta"))
        await here.proxy.at_rest()
        (newest,) = set(here.files) - before - {other_file(here, "beta")}
        newest.unlink()
        back = await here.proxy.turn(a)
        assert back.told == ("restored", None)
        assert 0 < back.reused


def other_file(here: House, name: str) -> Path | None:
    """The newest file of that conversation."""
    word = b"".join(bytes([byte + 5, 0, 0, 0]) for byte in f"CANARY-{name}".encode())
    return next((path for path in here.files if word in path.read_bytes()), None)


async def test_a_crash_while_restoring_is_not_repeated_in_the_next_life(tmp_path: Path) -> None:
    async with house(tmp_path, shared=False) as here:
        a = await stored(here)
        (path,) = here.files
        os.truncate(path, path.stat().st_size - 1)
        first = await here.proxy.turn(a)
        assert first.status in (502, 503)
        assert here.fake.aborts == 1
        await here.fake.start()
        again = await here.proxy.turn(a)
        assert (again.status, again.told) == (200, ("cold", "snapshot-invalid"))
        assert here.fake.aborts == 1


async def test_a_restore_that_both_did_not_survive_is_not_repeated(tmp_path: Path) -> None:
    """Nobody saw how it ended: the mark that was made before is all there is."""
    async with house(tmp_path, restore={"timeout_seconds": 20}) as here:
        a = await stored(here)
        here.fake.faults.fail("restore", Failure.HANG)
        here.forget_calls()
        asking = asyncio.create_task(here.proxy.turn(a))
        await here.proxy.until(lambda: any(verb == "restore" for verb, _ in here.deeds))
        (mark,) = (here.state_dir / "restoring").iterdir()
        await here.proxy.stop()
        await here.fake.kill()
        mark.touch()  # as a kill would have left it: an end in good order clears it
        with pytest.raises(aiohttp.ClientError):
            await asking
        here.fake.faults.planned.clear()
        await here.fake.start()
        await here.proxy.start()
        await here.proxy.ready()
        here.forget_calls()
        assert (await here.proxy.turn(a)).told == ("cold", "snapshot-invalid")
        assert all(verb != "restore" for verb, _ in here.deeds)


async def test_a_strict_proxy_refuses_what_it_cannot_restore(tmp_path: Path) -> None:
    async with house(tmp_path, failure={"strict": True}) as here:
        a = await stored(here)
        here.fake.faults.fail("restore", Failure.ERROR, times=1)
        refused = await here.proxy.turn(a)
        assert (refused.status, refused.code) == (503, "KV_RESTORE_FAILED")
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_a_restore_that_proves_useless_is_counted_and_told(tmp_path: Path) -> None:
    async with house(tmp_path, useless_restores=True) as here:
        a = await stored(here)
        back = await here.proxy.turn(a)
        assert (back.told, back.reused) == (("restored", None), 0)
        await here.proxy.at_rest()
        stats = (await here.proxy.status())["stats"]
        assert stats["ineffective_restores"] == 1


@pytest.mark.parametrize("spoil", [b"{", b"", b'{"schema_version": 99}'], ids=["torn", "empty", "newer"])
async def test_a_corrupt_manifest_is_put_aside_with_one_warning_and_the_request_is_cold(
    tmp_path: Path, spoil: bytes
) -> None:
    async with house(tmp_path) as here:
        a = await stored(here)
        await here.proxy.stop()
        (manifest,) = here.manifests()
        manifest.write_bytes(spoil)
        await here.proxy.start()
        await here.proxy.ready()
        assert len(here.proxy.heard(Warned)) == 1
        assert (await here.proxy.turn(a)).told == ("cold", "new-session")
        assert len(list((here.state_dir / "quarantine").iterdir())) == 1


async def test_a_manifest_deleted_while_we_run_costs_nothing_before_the_next_start(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        a = await stored(here)
        (manifest,) = here.manifests()
        manifest.unlink()
        assert (await here.proxy.turn(a)).told == ("restored", None)
        await here.proxy.turn(Talk("beta"))
        await here.proxy.at_rest()
        await here.proxy.restart()
        await here.proxy.ready()
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_a_server_that_changed_its_model_is_not_given_the_snapshots_of_the_other(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as here:
        a = await stored(here)
        await here.fake.restart(ftype="Q4_0")
        assert (await here.proxy.turn(a)).told == ("cold", "fingerprint-mismatch")
        await here.fake.restart(ftype="all F32")
        assert (await here.proxy.turn(a)).told == ("restored", None)
