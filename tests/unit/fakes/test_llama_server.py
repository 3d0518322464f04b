from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes.actions import Saved
from tests.fakes.faults import Failure
from tests.fakes.llama_server import FakeLlamaServer, parse

LONG = "some text that is long enough to be worth keeping " * 4


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeLlamaServer]:
    async with FakeLlamaServer(slots=2, slot_dir=tmp_path, http_poll=0.02) as server:
        yield server


async def post(fake: FakeLlamaServer, path: str, body: Any = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession(fake.base_url) as session, session.post(path, json=body) as reply:
        return reply.status, await reply.json()


async def get(fake: FakeLlamaServer, path: str) -> Any:
    async with aiohttp.ClientSession(fake.base_url) as session, session.get(path) as reply:
        return await reply.json()


async def act(fake: FakeLlamaServer, action: str, slot: int, filename: str = "f") -> tuple[int, Any]:
    return await post(fake, f"/slots/{slot}?action={action}", {"filename": filename})


async def complete(fake: FakeLlamaServer, prompt: str, **more: Any) -> Any:
    status, answer = await post(fake, "/completion", {"prompt": prompt, "n_predict": 2, **more})
    assert status == 200
    return answer


async def text_of_stream(fake: FakeLlamaServer, headers: dict[str, str] | None = None, **body: Any) -> str:
    async with (
        aiohttp.ClientSession(fake.base_url) as session,
        session.post("/completion", json={"stream": True, **body}, headers=headers) as reply,
    ):
        events = [json.loads(line[6:]) async for line in reply.content if line.startswith(b"data: ")]
    return "".join(event["content"] for event in events)


async def busy_with(fake: FakeLlamaServer, prompt: str, slot: int, n_predict: int) -> asyncio.Task[str]:
    """Returns once the slot generates."""
    running = asyncio.create_task(
        text_of_stream(fake, prompt=prompt, id_slot=slot, n_predict=n_predict, ignore_eos=True)
    )
    await until(lambda: fake.slots[slot].progress.n_decoded > 0)
    return running


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(5000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("waited in vain")


async def test_an_answer_repeats_the_canary_its_slot_holds(fake: FakeLlamaServer) -> None:
    assert (await complete(fake, "say CANARY-blue", n_predict=23))["content"] == "CANARY-blue CANARY-blue"


async def test_requests_of_two_slots_run_at_once_and_keep_to_themselves(fake: FakeLlamaServer) -> None:
    fake.faults.token_delay = 0.001
    first = await busy_with(fake, "CANARY-one", 0, 60)
    second = await busy_with(fake, "CANARY-two", 1, 60)
    assert not first.done()
    assert "two" not in await first
    assert "one" not in await second
    assert fake.violations == []
    assert fake.max_concurrent_on_slot == 1


async def test_a_pin_on_a_busy_slot_is_a_violation(fake: FakeLlamaServer) -> None:
    running = await busy_with(fake, "CANARY-one", 0, 200)
    await complete(fake, "CANARY-two", id_slot=0)
    assert "two" not in await running
    assert fake.max_concurrent_on_slot == 2
    assert len(fake.violations) == 1
    assert "pinned request" in fake.violations[0]


async def test_mixing_lets_the_running_answer_go_on_in_foreign_words(fake: FakeLlamaServer) -> None:
    fake.faults.mix_on_busy = True
    running = await busy_with(fake, "CANARY-one", 0, 400)
    await complete(fake, "CANARY-two", id_slot=0)
    assert "CANARY-two CANARY-two" in await running


async def test_an_action_on_a_busy_slot_is_a_violation(fake: FakeLlamaServer) -> None:
    running = await busy_with(fake, "x", 1, 200)
    await act(fake, "save", 1)
    await running
    assert "action" in fake.violations[0]


async def test_calls_are_logged_in_order_of_arrival(fake: FakeLlamaServer) -> None:
    await act(fake, "save", 1, "one")
    await complete(fake, "x")
    await post(fake, "/slots/0?action=erase")
    assert fake.management() == [("save", 1, "one"), ("erase", 0, None)]
    assert [call.target for call in fake.calls][1] == "/completion"
    assert json.loads(fake.calls[1].body)["prompt"] == "x"
    assert fake.calls[0].at <= fake.calls[1].at <= fake.calls[2].at


@pytest.mark.parametrize("action", ["save", "restore", "erase"])
async def test_a_planned_error_is_answered_with_500_and_does_nothing(
    fake: FakeLlamaServer, action: str, tmp_path: Path
) -> None:
    await complete(fake, LONG, id_slot=0)
    held = list(fake.slots[0].tokens)
    fake.faults.fail(action, Failure.ERROR, times=1)
    status, _ = await act(fake, action, 0)
    assert status == 500
    assert fake.slots[0].tokens == held
    assert list(tmp_path.iterdir()) == []


async def test_a_hanging_action_never_answers(fake: FakeLlamaServer) -> None:
    fake.faults.fail("save", Failure.HANG)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await act(fake, "save", 0)


@pytest.mark.parametrize(("failure", "written"), [(Failure.CLOSE, False), (Failure.LOST_ANSWER, True)])
async def test_a_cut_action_is_either_not_done_or_done_unheard(
    fake: FakeLlamaServer, failure: Failure, written: bool, tmp_path: Path
) -> None:
    fake.faults.fail("save", failure)
    with pytest.raises(aiohttp.ClientError):
        await act(fake, "save", 0)
    assert (tmp_path / "f").exists() is written


async def test_an_answer_may_be_garbage(fake: FakeLlamaServer) -> None:
    fake.faults.fail("save", Failure.GARBAGE)
    with pytest.raises(json.JSONDecodeError):
        await act(fake, "save", 0)


async def test_a_short_file_is_answered_as_if_it_were_whole(fake: FakeLlamaServer, tmp_path: Path) -> None:
    await complete(fake, LONG, id_slot=0)
    fake.faults.fail("save", Failure.SHORT_FILE)
    status, reply = await act(fake, "save", 0)
    assert status == 200
    assert reply["n_written"] == (tmp_path / "f").stat().st_size + 2600


async def test_a_full_disk_destroys_the_old_file(fake: FakeLlamaServer, tmp_path: Path) -> None:
    await complete(fake, LONG, id_slot=0)
    whole = (await act(fake, "save", 0))[1]["n_written"]
    fake.faults.fail("save", Failure.FULL_DISK)
    assert (await act(fake, "save", 0))[0] == 500
    assert (tmp_path / "f").stat().st_size < whole


async def test_counts_and_ids_may_be_wrong(fake: FakeLlamaServer) -> None:
    fake.faults.n_saved_delta, fake.faults.n_restored_delta, fake.faults.id_slot_delta = 5, -1, 1
    await complete(fake, "x", id_slot=0)
    held = len(fake.slots[0].tokens)
    saved = (await act(fake, "save", 0))[1]
    restored = (await act(fake, "restore", 0))[1]
    assert (saved["n_saved"], saved["id_slot"]) == (held + 5, 1)
    assert (restored["n_restored"], restored["id_slot"]) == (held - 1, 1)


async def test_a_late_save_is_acted_on_after_its_client_left(fake: FakeLlamaServer, tmp_path: Path) -> None:
    fake.faults.late_actions = 0.2
    saving = asyncio.create_task(act(fake, "save", 0))
    await until(lambda: bool(fake.calls))
    saving.cancel()
    await complete(fake, LONG, id_slot=0)
    assert list(tmp_path.iterdir()) == []
    await until((tmp_path / "f").exists)
    await until(lambda: (tmp_path / "f").stat().st_size > 512 * len(LONG))


async def test_a_long_save_holds_up_the_whole_server(fake: FakeLlamaServer) -> None:
    fake.faults.save_seconds = 0.3
    saving = asyncio.create_task(act(fake, "save", 0))
    await until(lambda: len(fake.calls) == 1)
    other = asyncio.create_task(complete(fake, "x", id_slot=1))
    seeing = asyncio.create_task(get(fake, "/slots"))
    await until(lambda: len(fake.calls) == 3)
    assert not fake.slots[1].is_processing
    assert not seeing.done()
    await saving
    await other
    await seeing


async def test_a_kill_between_save_and_answer_leaves_the_file(fake: FakeLlamaServer, tmp_path: Path) -> None:
    seen: list[Saved] = []

    async def die(saved: Saved) -> None:
        seen.append(saved)
        await fake.kill()

    fake.on_save = die
    await complete(fake, LONG, id_slot=0)
    with pytest.raises(aiohttp.ClientError):
        await act(fake, "save", 0)
    assert not fake.alive
    assert seen[0].path == tmp_path / "f"
    assert seen[0].path.exists()
    assert len(seen[0].tokens) == len(LONG) + 2


async def test_a_new_life_begins_on_the_same_port_and_can_have_fewer_slots(fake: FakeLlamaServer) -> None:
    await complete(fake, LONG, id_slot=0)
    url, marker = fake.base_url, fake.media_marker
    await fake.restart(slots=1)
    assert fake.base_url == url
    assert fake.media_marker != marker
    assert [slot.tokens for slot in fake.slots] == [[]]
    assert fake.lives == 2
    assert (await complete(fake, LONG, id_slot=1))["id_slot"] == 0


async def test_a_file_short_by_a_byte_aborts_this_life(fake: FakeLlamaServer, tmp_path: Path) -> None:
    await complete(fake, LONG, id_slot=0)
    await act(fake, "save", 0)
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-1])
    with pytest.raises(aiohttp.ClientError):
        await act(fake, "restore", 1)
    assert (fake.alive, fake.aborts) == (False, 1)


async def test_a_stream_is_cut_after_its_events(fake: FakeLlamaServer) -> None:
    fake.faults.cut_stream_after = 3
    async with (
        aiohttp.ClientSession(fake.base_url) as session,
        session.post("/completion", json={"prompt": "x", "n_predict": 50, "stream": True}) as reply,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.read()
    await until(lambda: not any(slot.is_processing for slot in fake.slots))


async def test_a_slow_first_token_still_sends_headers_at_once(fake: FakeLlamaServer) -> None:
    fake.faults.slow_first_token = 0.3
    loop = asyncio.get_running_loop()
    async with (
        aiohttp.ClientSession(fake.base_url) as session,
        session.post("/completion", json={"prompt": "x", "n_predict": 1, "stream": True}) as reply,
    ):
        headers_at = loop.time()
        assert await reply.content.readany()
    assert loop.time() - headers_at > 0.1


async def test_a_silent_stream_can_be_pinged(fake: FakeLlamaServer) -> None:
    fake.faults.slow_first_token, fake.faults.ping_every = 0.2, 0.01
    async with (
        aiohttp.ClientSession(fake.base_url) as session,
        session.post("/completion", json={"prompt": "x", "n_predict": 1, "stream": True}) as reply,
    ):
        assert (await reply.read()).startswith(b":\n\n:\n\n")


async def test_a_client_that_leaves_before_the_first_token_frees_the_slot(fake: FakeLlamaServer) -> None:
    fake.faults.slow_first_token = 30
    running = asyncio.create_task(text_of_stream(fake, prompt="x", id_slot=0))
    await until(lambda: fake.slots[0].is_processing)
    running.cancel()
    await until(lambda: not fake.slots[0].is_processing)


async def test_a_conversation_id_keeps_even_an_unstarted_answer_running(fake: FakeLlamaServer) -> None:
    fake.faults.slow_first_token = 0.2
    running = asyncio.create_task(text_of_stream(fake, {"X-Conversation-Id": "c"}, prompt="x", n_predict=9))
    await until(lambda: fake.slots[1].is_processing)
    running.cancel()
    await until(lambda: not fake.slots[1].is_processing)
    assert len(fake.slots[1].tokens) == 2 + 8


async def test_a_useless_restore_reuses_nothing_but_only_once(fake: FakeLlamaServer) -> None:
    fake.faults.useless_restores = True
    await complete(fake, LONG, id_slot=0)
    await act(fake, "save", 0)
    await act(fake, "restore", 1)
    assert (await complete(fake, LONG, id_slot=1))["timings"]["cache_n"] == 0
    assert (await complete(fake, LONG, id_slot=1))["timings"]["cache_n"] > 0


async def test_unpinned_requests_can_be_sent_to_one_slot(fake: FakeLlamaServer) -> None:
    fake.faults.unpinned_slot = 0
    assert [(await complete(fake, text))["id_slot"] for text in ("a" * 50, "b" * 50)] == [0, 0]


async def test_sleep_empties_the_slots_until_something_wakes_it(fake: FakeLlamaServer) -> None:
    await complete(fake, LONG, id_slot=0)
    fake.sleep()
    assert fake.slots[0].tokens == []
    assert (await act(fake, "save", 0))[1]["n_saved"] == 0


async def test_a_frozen_server_answers_when_it_thaws(fake: FakeLlamaServer) -> None:
    fake.faults.frozen = True
    waiting = asyncio.create_task(complete(fake, "x"))
    await until(lambda: bool(fake.calls))
    assert not waiting.done()
    fake.faults.frozen = False
    await waiting


async def test_a_loading_server_refuses_everything(fake: FakeLlamaServer) -> None:
    fake.faults.loading = True
    async with aiohttp.ClientSession(fake.base_url) as session, session.get("/health") as reply:
        assert reply.status == 503
        assert reply.headers["Connection"] == "close"
        assert (await reply.json())["error"]["message"] == "Loading model"


async def test_an_idle_connection_can_be_closed_without_a_word(fake: FakeLlamaServer) -> None:
    fake.faults.drop_idle_after = 0.01
    reader, writer = await asyncio.open_connection(fake.host, fake.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"Keep-Alive" in await reader.read()
    writer.close()


async def test_embeddings_take_a_slot_and_its_content(tmp_path: Path) -> None:
    async with FakeLlamaServer(slots=1, slot_dir=tmp_path, embeddings=True) as fake:
        await complete(fake, LONG)
        status, reply = await post(fake, "/v1/embeddings", {"input": ["a", "bc"]})
        assert status == 200
        assert len(reply["data"]) == 2
        assert len(fake.slots[0].tokens) == 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_completions_can_be_made_to_fail(fake: FakeLlamaServer, path: str) -> None:
    fake.faults.fail("completion", Failure.ERROR, times=1)
    assert (await post(fake, path, {"messages": [], "input": "x"}))[0] == 500


def test_the_command_line_sets_up_a_fake() -> None:
    fake = parse(["--port", "0", "--slots", "3", "--slot-save-path", "d", "--set", "slow_first_token=1.5"])
    assert (fake.setup.slots, fake.setup.slot_dir) == (3, Path("d"))
    assert fake.faults.slow_first_token == 1.5


def test_an_unknown_fault_on_the_command_line_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["--set", "nonsense=1"])
    assert "unknown fault 'nonsense'" in capsys.readouterr().err


async def test_the_log_of_runs_tells_what_a_slot_held_and_what_it_cost(fake: FakeLlamaServer) -> None:
    await complete(fake, LONG, id_slot=0)
    await complete(fake, LONG + "and more", id_slot=0)
    first, second = fake.runs
    assert (first.slot, first.held, first.kept, first.computed) == (0, [], 0, len(first.prompt))
    assert (second.held, second.kept) == (first.left, len(first.prompt))
    assert second.computed == len(second.prompt) - second.kept
    assert first.left[: len(first.prompt)] == first.prompt
    assert (first.life, second.life) == (0, 0)
