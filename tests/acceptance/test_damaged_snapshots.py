"""Snapshots that are not what they were, and disks that are full: cold, never wrong, and the server lives."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import SetStage, Stage
from tests.support.load import Answer, Conversation, client

pytestmark = pytest.mark.real

ONE_SLOT = ("-c", "8192", "-np", "1", "--cache-ram", "0")
QUIET = ("checkpoint.on_idle_seconds=0",)
MIB = 1 << 20

Damage = Callable[[Path, Path], None]


def delete(file: Path, other: Path) -> None:
    file.unlink()


def shorten_by_one(file: Path, other: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def halve(file: Path, other: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path, other: Path) -> None:
    os.truncate(file, 0)


def replace(file: Path, other: Path) -> None:
    copy = file.with_name("copy")
    shutil.copyfile(other, copy)
    copy.replace(file)


def alter(file: Path, other: Path) -> None:
    """One byte in the middle; size and time of change as before."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(before.st_size // 2)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 0xFF]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


async def files_of(stage: Stage, conversation: Conversation, *, is_visible: bool = True) -> list[Path]:
    """The snapshots of a conversation, the newest last: once what it left its slot with is published, which
    a switch does not wait for, and hashed where kvproxy can see the files."""
    async with asyncio.timeout(15):
        while (generations := await published(stage, conversation, is_visible)) is None:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.02)
    return [stage.slot_dir / one["name"] for one in sorted(generations, key=lambda one: one["saved_at"])]


async def published(
    stage: Stage, conversation: Conversation, is_visible: bool
) -> list[dict[str, Any]] | None:
    """The generations of a conversation; None while the newest is not complete."""
    (session,) = (await stage.kvproxy.session(conversation.name))["sessions"]
    generations = [one for manifest in session["snapshots"] for one in manifest["generations"]]
    left_with = session["revision"] - (session["slot"] is not None)  # one turn since, if it is back in a slot
    is_newest_there = any(one["revision"] == left_with for one in generations)
    is_hashed = all(one["sha256"] or not is_visible for one in generations)
    return generations if is_newest_there and is_hashed else None


@pytest.mark.parametrize("damage", [delete, shorten_by_one, halve, empty, replace, alter])
async def test_a_damaged_file_costs_a_cold_prompt_and_nothing_else(
    set_stage: SetStage, damage: Damage
) -> None:
    stage = await set_stage(*ONE_SLOT, settings=QUIET)
    pid = stage.llama.pid
    victim, other = Conversation.about("victim"), Conversation.about("other")
    async with client(stage.url) as session:
        await victim.turn(session)
        await other.turn(session)
        assert (await victim.turn(session)).outcome == "restored"
        await other.turn(session)
        foreign = (await files_of(stage, other))[-1]
        for file in await files_of(stage, victim):
            damage(file, foreign)
        stage.tap.forget()
        answer = await victim.turn(session)
        assert (answer.status, answer.outcome, answer.reason) == (200, "cold", "snapshot-invalid")
        assert answer.reused == 0
        assert "restore" not in [action for action, _ in stage.tap.slot_actions()]
        assert (await other.turn(session)).outcome == "restored"
        assert (await victim.turn(session)).outcome == "restored"
    assert (stage.llama.is_running, stage.llama.pid) == (True, pid)
    assert len(stage.kvproxy.events("kv.snapshot.invalidated")) == 2


async def test_when_only_the_newest_file_is_damaged_the_one_before_serves(set_stage: SetStage) -> None:
    stage = await set_stage(*ONE_SLOT, settings=QUIET)
    victim, other = Conversation.about("victim"), Conversation.about("other")
    async with client(stage.url) as session:
        first = await victim.turn(session)
        await other.turn(session)
        await victim.turn(session)
        await other.turn(session)
        newest = (await files_of(stage, victim))[-1]
        halve(newest, newest)
        answer = await victim.turn(session)
    assert (answer.status, answer.outcome) == (200, "restored")
    assert answer.reused >= first.prompt


async def test_a_file_that_kills_the_server_does_so_once(set_stage: SetStage) -> None:
    """Short by one byte, in a directory that kvproxy cannot see: llama-server aborts while it restores."""
    stage = await set_stage(*ONE_SLOT, settings=QUIET, is_visible=False)
    victim, other = Conversation.about("victim"), Conversation.about("other")
    async with client(stage.url) as session:
        await victim.turn(session)
        await other.turn(session)
        (file,) = await files_of(stage, victim, is_visible=False)
        shorten_by_one(file, file)
        fatal = await victim.turn(session)
        assert fatal.status in (502, 503)
        assert await asyncio.wait_for(stage.llama.wait(), 10) != 0
        await stage.llama.start()
        pid = stage.llama.pid
        answer = await victim.turn(session)
        assert (answer.status, answer.outcome) == (200, "cold")
        await other.turn(session)
        assert (await victim.turn(session)).outcome == "restored"
    assert (stage.llama.is_running, stage.llama.pid) == (True, pid)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        # Only root may mount, and not in every container; nothing else gives a really full disk.
        pytest.skip(f"cannot mount a tmpfs here: {getattr(error, 'stderr', error)!r}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room; the file that takes it."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            return ballast
    raise AssertionError("the disk never filled")


async def switch_on_a_full_disk(stage: Stage, disk: Path) -> tuple[Answer, Answer]:
    """The first turn back after a switch on a full disk, and one after there is room again."""
    pid = stage.llama.pid
    a, b = Conversation.about("a"), Conversation.about("b")
    async with client(stage.url) as session:
        ballast = fill(disk)
        await a.turn(session)
        await b.turn(session)
        full = await a.turn(session)
        ballast.unlink()
        await b.turn(session)
        roomy = await a.turn(session)
    assert (full.status, roomy.status) == (200, 200)
    assert (stage.llama.is_running, stage.llama.pid) == (True, pid)
    return full, roomy


async def test_a_full_slot_directory_means_cold_and_heals(set_stage: SetStage, small_disk: Path) -> None:
    stage = await set_stage(*ONE_SLOT, settings=QUIET, slot_dir=small_disk)
    full, roomy = await switch_on_a_full_disk(stage, small_disk)
    assert (full.outcome, roomy.outcome) == ("cold", "restored")
    warnings = [event["message"] for event in stage.kvproxy.events("kv.warning")]
    assert ["nothing is saved until there is room" in message for message in warnings] == [True]
    assert stage.kvproxy.events("kv.session.save.failed") == []


async def test_a_full_state_directory_means_cold_and_heals(set_stage: SetStage, small_disk: Path) -> None:
    stage = await set_stage(*ONE_SLOT, settings=QUIET, state_dir=small_disk)
    full, roomy = await switch_on_a_full_disk(stage, small_disk)
    assert (full.outcome, roomy.outcome) == ("cold", "restored")
    assert stage.kvproxy.events("kv.session.save.failed")


async def test_a_full_slot_directory_is_shown_for_as_long_as_it_is_full(
    set_stage: SetStage, small_disk: Path
) -> None:
    stage = await set_stage(*ONE_SLOT, settings=QUIET, slot_dir=small_disk)
    ballast = fill(small_disk)
    a = Conversation.about("a")
    async with client(stage.url) as session:
        await a.turn(session)
        await stage.kvproxy.flush()
        full = await stage.kvproxy.status()
        assert (await stage.kvproxy.get_json("/kvproxy/readyz"))["status"] == "degraded"
        ballast.unlink()
        await a.turn(session)
        await stage.kvproxy.flush()
    (server,) = full["servers"]
    assert (server["state"], "are free where the snapshots lie" in server["reason"]) == ("degraded", True)
    assert full["stats"]["saves_without_room"] == 1
    (server,) = (await stage.kvproxy.status())["servers"]
    assert (server["state"], server["reason"]) == ("healthy", "")


async def test_a_full_state_directory_is_shown_for_as_long_as_it_is_full(
    set_stage: SetStage, small_disk: Path
) -> None:
    stage = await set_stage(*ONE_SLOT, settings=QUIET, state_dir=small_disk)
    ballast = fill(small_disk)
    a = Conversation.about("a")
    async with client(stage.url) as session:
        await a.turn(session)
        await stage.kvproxy.flush()
        (full,) = (await stage.kvproxy.status())["servers"]
        ballast.unlink()
        await stage.kvproxy.flush()
    assert (full["state"], "where the state directory lies" in full["reason"]) == ("degraded", True)
    (server,) = (await stage.kvproxy.status())["servers"]
    assert (server["state"], server["reason"]) == ("healthy", "")


async def test_a_slot_directory_that_is_away_for_a_moment_stops_no_save_after_that(
    set_stage: SetStage, tmp_path: Path
) -> None:
    settings = (*QUIET, "failure.max_consecutive_failures=2", "failure.cooldown_seconds=3600")
    stage = await set_stage(*ONE_SLOT, settings=settings)
    a = Conversation.about("a")
    async with client(stage.url) as session:
        await a.turn(session)
        stage.slot_dir.rename(tmp_path / "away")
        for _ in range(3):
            await stage.kvproxy.flush()
        (tmp_path / "away").rename(stage.slot_dir)
        await stage.kvproxy.flush()
    failed = await stage.kvproxy.until_events("kv.session.save.failed", 3)
    assert {event["outcome"] for event in failed} == {"store_failed"}
    assert len(await stage.kvproxy.until_events("kv.session.save.success", 1)) == 1
    assert stage.kvproxy.events("kv.persistence.circuit_open") == []
