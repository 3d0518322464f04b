from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvproxy.doctor import probe as probe_module
from kvproxy.doctor.probe import Probe, Probed, empty_slots, prompt_tokens, window_to_probe
from kvproxy.identifiers import SlotId, SnapshotName
from kvproxy.slotfile.window import Closed
from kvproxy.snapshots.files import ServerOwnedFiles, SharedDirectory, SnapshotFiles
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.replies import ActionFailure, Completed, Fault, Restored, Saved, SlotInfo
from tests.fakes.faults import Failure
from tests.fakes.llama_server import FakeLlamaServer

NEIGHBOUR, SLOT = SlotId(0), SlotId(1)


@asynccontextmanager
async def serving(tmp_path: Path, **options: Any) -> AsyncIterator[FakeLlamaServer]:
    async with FakeLlamaServer(slot_dir=tmp_path, **options) as fake:
        yield fake
        assert fake.violations == []


async def probe(
    fake: FakeLlamaServer, files: SnapshotFiles | None = None, neighbour: SlotId | None = NEIGHBOUR
) -> Probed:
    client = LlamaServer(fake.base_url, None, connect_timeout_seconds=2)
    try:
        return await Probe(client, files or ServerOwnedFiles(), SLOT, neighbour).run()
    finally:
        await client.close()


def info(slot: int, tokens: int | None, *, is_processing: bool = False) -> SlotInfo:
    return SlotInfo(SlotId(slot), is_processing, None, tokens, 0)


def test_only_idle_slots_without_tokens_are_empty() -> None:
    slots = (info(0, 0), info(1, 5), info(2, None), info(3, 0, is_processing=True))
    assert empty_slots(slots) == (0, 2)


async def test_two_rounds_come_through_and_nothing_stays(tmp_path: Path) -> None:
    async with serving(tmp_path) as fake:
        found = await probe(fake, SharedDirectory(tmp_path))
        actions = [(action, slot) for action, slot, _ in fake.management()]
        assert [len(slot.tokens) for slot in fake.slots] == [0, 0]
    extended, rewritten = found.extended, found.rewritten
    assert extended is not None
    assert rewritten is not None
    assert isinstance(extended.saved, Saved)
    assert isinstance(extended.restored, Restored)
    assert (extended.saved.tokens, extended.restored.tokens) == (600, 600)
    assert extended.answer == Completed(32, 600)
    assert rewritten.answer == Completed(32, 632)
    assert extended.file is not None
    assert extended.file.is_ok
    assert (found.trouble, found.is_cleared, found.leftover) == ("", False, None)
    assert list(tmp_path.iterdir()) == []
    one_round = [("save", 1), ("erase", 1), ("restore", 1)]
    assert actions == [*one_round, *one_round, ("erase", 1), ("erase", 0)]


async def test_a_file_out_of_reach_is_named_and_shrunk(tmp_path: Path) -> None:
    async with serving(tmp_path) as fake:
        found = await probe(fake)
    (file,) = tmp_path.iterdir()
    assert found.leftover == file.name
    assert file.stat().st_size < 100


async def test_a_file_that_lies_elsewhere_is_missed_and_named(tmp_path: Path) -> None:
    slots, elsewhere = tmp_path / "slots", tmp_path / "elsewhere"
    slots.mkdir()
    elsewhere.mkdir()
    async with serving(slots) as fake:
        found = await probe(fake, SharedDirectory(elsewhere))
    assert found.extended is not None
    assert found.extended.file is not None
    assert found.extended.file.reason == "file is missing"
    assert [path.name for path in slots.iterdir()] == [found.leftover]


async def test_a_server_that_clears_idle_slots_is_seen(tmp_path: Path) -> None:
    async with serving(tmp_path, volatile=True) as fake:
        assert (await probe(fake)).is_cleared is True


async def test_without_a_neighbour_nothing_is_said_of_idle_slots(tmp_path: Path) -> None:
    async with serving(tmp_path) as fake:
        assert (await probe(fake, neighbour=None)).is_cleared is None
        assert {slot for _, slot, _ in fake.management()} == {1}


async def test_a_restore_that_is_not_reused_is_seen(tmp_path: Path) -> None:
    async with serving(tmp_path, useless_restores=True) as fake:
        found = await probe(fake)
    assert found.extended is not None
    assert found.extended.answer == Completed(632, 0)


@pytest.mark.parametrize("verb", ["save", "erase", "restore"])
async def test_an_action_that_fails_ends_the_round_and_leaves_no_tokens(tmp_path: Path, verb: str) -> None:
    async with serving(tmp_path) as fake:
        fake.faults.fail(verb, Failure.ERROR, times=1)
        found = await probe(fake, SharedDirectory(tmp_path))
        assert [len(slot.tokens) for slot in fake.slots] == [0, 0]
    assert found.extended is not None
    assert found.extended.answer is None
    ends = (found.extended.saved, found.extended.restored)
    assert any(isinstance(end, ActionFailure) and end.fault is Fault.FAILED for end in ends)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["save", "erase", "restore"])
async def test_after_an_action_without_an_answer_no_other_is_made(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "ACTION_SECONDS", 0.05)
    async with serving(tmp_path) as fake:
        fake.faults.fail(verb, Failure.HANG)
        found = await probe(fake, SharedDirectory(tmp_path))
        assert fake.management()[-1][0] == verb
        assert found.leftover == fake.management()[0][2]


async def test_a_server_that_runs_no_completion_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path) as fake:
        fake.faults.fail("completion", Failure.ERROR)
        found = await probe(fake)
    assert found.trouble.startswith("POST /completion: ")
    assert found.extended is None


async def test_the_second_round_replaces_the_reply_by_what_no_model_would_say(tmp_path: Path) -> None:
    """A model that guesses the text would turn the rewritten reply into an exact continuation."""
    async with serving(tmp_path) as fake:
        await probe(fake, neighbour=None)
        prompts = [json.loads(call.body)["prompt"] for call in fake.calls if call.path == "/completion"]
    opening, turn, rewritten = prompts
    assert (len(opening), len(turn)) == (600, 632)
    assert rewritten == turn + opening[:32]


async def test_each_probe_has_a_text_of_its_own(tmp_path: Path) -> None:
    """A server that remembers an earlier probe in memory would make a useless restore look good."""
    async with serving(tmp_path) as fake:
        await probe(fake)
        await probe(fake)
        texts = [call.body for call in fake.calls if call.path == "/tokenize"]
    assert len(set(texts)) == 2


@pytest.mark.parametrize(
    ("window", "n_ctx", "probed", "tokens"),
    [
        (None, 8192, None, 600),
        (512, 8192, 512, 600),
        (1024, 8192, 1024, 1112),
        (1024, None, 1024, 1112),
        (1024, 1185, 1024, 1112),
        (1024, 1184, None, 600),
        (4096, 8192, 4096, 4184),
        (8192, 65536, None, 600),
    ],
)
def test_the_prompt_is_longer_than_a_window_that_is_opened_if_that_is_quick(
    window: int | None, n_ctx: int | None, probed: int | None, tokens: int
) -> None:
    assert window_to_probe(window, n_ctx) == probed
    assert prompt_tokens(probed) == tokens


class Windowed(SharedDirectory):
    """Opens the window of anything: the fake server's files have none."""

    async def open_window(self, name: SnapshotName, copy: SnapshotName, window: int) -> Closed | None:
        if window == self.shut:
            return Closed.NO_WINDOW
        await asyncio.to_thread(shutil.copyfile, self.path / name, self.path / copy)
        return None

    shut = 0


@pytest.mark.parametrize("is_shut", [True, False])
async def test_a_copy_with_an_open_window_is_restored_and_does_not_stay(
    tmp_path: Path, is_shut: bool
) -> None:
    files = Windowed(tmp_path)
    files.shut = 700 if is_shut else 0
    async with serving(tmp_path) as fake:
        client = LlamaServer(fake.base_url, None, connect_timeout_seconds=2)
        found = await Probe(client, files, SLOT, NEIGHBOUR, 700).run()
        await client.close()
    assert found.extended is not None
    assert found.extended.answer == Completed(32, 788)
    assert found.extended.is_opened == (not is_shut)
    assert list(tmp_path.iterdir()) == []
