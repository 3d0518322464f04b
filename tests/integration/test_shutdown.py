"""The end of kvproxy, asked for or not, and the life after it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvproxy.checkpoint.rounds import Flushed
from kvproxy.errors import StateDirError
from tests.fakes.faults import Failure
from tests.fakes.llama_server import FakeLlamaServer
from tests.support.daemon import Kvproxy
from tests.support.proxy import House, KvProxy, house
from tests.support.talk import Stream, Talk, answer_of


async def both_restart(here: House) -> None:
    """kvproxy and the server, so that only what is on the disk is left."""
    await here.proxy.stop()
    await here.fake.restart()
    await here.proxy.start()
    await here.proxy.ready()


async def test_what_is_dirty_is_saved_and_the_next_process_restores_it(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2) as here:
        talks = [Talk("alpha"), Talk("beta")]
        for talk in talks:
            await here.proxy.turn(talk)
        assert await here.proxy.drain() == Flushed(saved=2)
        await both_restart(here)
        for talk in talks:
            back = await here.proxy.turn(talk)
            assert back.told == ("restored", None)
            assert back.reused > back.computed


async def test_a_running_stream_ends_well_and_what_it_left_is_saved(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.005) as here:
        a = Talk("alpha", predict=60)
        await here.proxy.turn(Talk("idle", predict=2))
        async with here.proxy.stream(a) as stream:
            await stream.first()
            drain = asyncio.create_task(here.proxy.drain())
            await here.proxy.until(lambda: here.deeds != [])
            assert here.proxy.slot_states[int(stream.slot or 0)] == "serving"
            a.heard(await stream.rest())
        assert await drain == Flushed(saved=2)
        await both_restart(here)
        assert (await here.proxy.turn(a)).told == ("restored", None)


async def test_nothing_new_is_taken_while_we_drain_and_whoever_waits_is_sent_away(tmp_path: Path) -> None:
    async with house(tmp_path, token_delay=0.005) as here:
        async with here.proxy.stream(Talk("alpha", predict=60)) as stream:
            await stream.first()
            waiting = asyncio.create_task(here.proxy.turn(Talk("beta")))
            await here.proxy.until(lambda: here.proxy.runtime.desk.waiting == 1)
            drain = asyncio.create_task(here.proxy.drain())
            refused = [await waiting, await here.proxy.turn(Talk("gamma"))]
            for answer in refused:
                assert (answer.status, answer.code) == (503, "KV_DRAINING")
                assert int(answer.headers["Retry-After"]) >= 1
            ready = await here.proxy.admin("GET", "readyz")
            assert (ready.status, ready.body["status"]) == (503, "draining")
            assert (await here.proxy.admin("GET", "healthz")).status == 200
            assert (await here.proxy.status())["draining"]
            await stream.rest()
        assert await drain == Flushed(saved=1)
        assert here.completions() == 1


async def test_a_stream_that_does_not_end_cannot_hold_the_end_beyond_its_time(tmp_path: Path) -> None:
    async with house(tmp_path, slots=2, token_delay=0.02) as here:
        await here.proxy.turn(Talk("idle", predict=1))
        async with here.proxy.stream(Talk("alpha", predict=1000)) as stream:
            await stream.first()
            loop = asyncio.get_running_loop()
            began = loop.time()
            assert await here.proxy.drain(1.0) == Flushed(saved=1, failed=1)
            assert 0.7 < loop.time() - began < 10


async def test_a_save_that_hangs_cannot_hold_the_end_for_long(tmp_path: Path) -> None:
    async with house(tmp_path, checkpoint={"timeout_seconds": 0.3}) as here:
        await here.proxy.turn(Talk("alpha"))
        await here.proxy.admin("POST", "flush")
        await here.proxy.turn(Talk("alpha"))
        here.fake.faults.fail("save", Failure.HANG, times=1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await here.proxy.drain(60.0) == Flushed(failed=1)
        assert loop.time() - began < 30
        await here.fake.restart()


async def test_a_save_that_takes_longer_than_there_is_time_counts_as_lost(tmp_path: Path) -> None:
    async with house(tmp_path, checkpoint={"timeout_seconds": 60}) as here:
        await here.proxy.turn(Talk("alpha"))
        here.fake.faults.fail("save", Failure.HANG, times=1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await here.proxy.drain(0.5) == Flushed(failed=1)
        assert loop.time() - began < 30
        await here.fake.restart()


async def test_a_save_that_is_under_way_is_waited_for_and_counted(tmp_path: Path) -> None:
    async with house(tmp_path, save_seconds=0.3) as here:
        await here.proxy.turn(Talk("alpha"))
        save = asyncio.create_task(here.proxy.admin("POST", "sessions/alpha/save"))
        await here.proxy.until(lambda: here.proxy.slot_states == ["saving"])
        assert await here.proxy.drain() == Flushed(saved=1)
        assert (await save).body["saves"][0]["outcome"] == "published"
        assert here.deeds == [("save", 0)]


async def test_without_a_server_the_end_comes_at_once(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        await here.proxy.turn(Talk("alpha"))
        await here.fake.kill()
        loop = asyncio.get_running_loop()
        began = loop.time()
        flushed = await here.proxy.drain(60.0)
        assert loop.time() - began < 30
        assert flushed == Flushed(failed=1)


async def test_an_end_that_was_told_not_to_save_saves_nothing(tmp_path: Path) -> None:
    async with house(tmp_path, checkpoint={"on_shutdown": False}) as here:
        await here.proxy.turn(Talk("alpha"))
        assert await here.proxy.drain() == Flushed()
        assert here.files == []


async def test_a_second_instance_on_the_same_state_directory_is_refused_by_name(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        with pytest.raises(StateDirError, match=f"{here.state_dir} is in use"):
            async with KvProxy(here.proxy.settings):
                pass


async def test_a_second_process_ends_with_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        second = await asyncio.to_thread(_serve, here.fake.base_url, here.state_dir)
        assert second.returncode == 1
        (line,) = second.stderr.splitlines()
        assert str(here.state_dir) in line
        assert "state_dir" in line


def _serve(upstream: str, state_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvproxy", "serve", "--upstream", upstream]
    where = ["--listen", "127.0.0.1:0", "--state-dir", str(state_dir)]
    return subprocess.run([*command, *where], capture_output=True, text=True, timeout=20)


SETTINGS = ("checkpoint.min_tokens=0", "checkpoint.on_idle_seconds=0.2")


async def test_a_killed_process_leaves_what_its_idle_checkpoint_saved(tmp_path: Path) -> None:
    async with FakeLlamaServer(slots=1, slot_dir=tmp_path) as fake:
        async with Kvproxy(fake.base_url, tmp_path / "state", *SETTINGS) as daemon:
            first = await ask(daemon, "alpha")
            assert first == ("cold", "new-session")
            await daemon.until_saved()
            await daemon.kill()
            await daemon.start()
            assert await ask(daemon, "alpha") == ("restored", None)


async def test_a_process_that_is_asked_to_end_saves_at_once_and_ends_well(tmp_path: Path) -> None:
    async with FakeLlamaServer(slots=1, slot_dir=tmp_path) as fake:
        async with Kvproxy(fake.base_url, tmp_path / "state", "checkpoint.min_tokens=0") as daemon:
            await ask(daemon, "alpha")
            assert await daemon.stop() == 0
            await fake.restart()
            await daemon.start()
            assert await ask(daemon, "alpha") == ("restored", None)


async def ask(daemon: Kvproxy, name: str) -> tuple[str | None, str | None]:
    talk = Talk(name)
    async with (
        aiohttp.ClientSession(daemon.base_url) as session,
        session.post("/v1/chat/completions", json=talk.body(), headers=talk.headers) as response,
    ):
        answer = await answer_of(response)
    assert answer.status == 200
    assert talk.is_mine(answer.text)
    return answer.told


ENDLESS = "server.drain_seconds=1"


@asynccontextmanager
async def one_endless_stream(tmp_path: Path, *settings: str) -> AsyncIterator[Kvproxy]:
    """A daemon that relays a stream which will not end in time."""
    talk = Talk("alpha", predict=5000)
    async with (
        FakeLlamaServer(slots=1, slot_dir=tmp_path, token_delay=0.02) as fake,
        Kvproxy(fake.base_url, tmp_path / "state", *settings) as daemon,
        aiohttp.ClientSession(daemon.base_url) as session,
        session.post("/v1/chat/completions", json=talk.body(stream=True), headers=talk.headers) as response,
    ):
        await Stream(response).first()
        yield daemon


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_stream_cut_by_the_end_is_our_doing_and_told_as_not_saved_in_time(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with one_endless_stream(tmp_path, ENDLESS) as daemon:
        began = asyncio.get_running_loop().time()
        assert await daemon.stop(number) == 1
        assert asyncio.get_running_loop().time() - began < 30
        assert "0 conversations, 1 could not be saved" in daemon.log()
        (failed,) = daemon.events("kv.request.failed")
        assert (failed["source"], failed["code"]) == ("proxy", "KV_DRAINING")


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with one_endless_stream(tmp_path, "server.drain_seconds=60") as daemon:
        first = asyncio.create_task(daemon.stop())
        await daemon.until_logged("shutting down")
        began = asyncio.get_running_loop().time()
        assert await daemon.stop() == 130
        assert asyncio.get_running_loop().time() - began < 30
        assert await first == 130


async def test_a_save_that_hangs_does_not_hold_the_process_beyond_its_time(tmp_path: Path) -> None:
    settings = (ENDLESS, "checkpoint.min_tokens=0")
    async with FakeLlamaServer(slots=1, slot_dir=tmp_path) as fake:
        async with Kvproxy(fake.base_url, tmp_path / "state", *settings) as daemon:
            await ask(daemon, "alpha")
            fake.faults.fail("save", Failure.HANG, times=1)
            began = asyncio.get_running_loop().time()
            assert await daemon.stop() == 1
            assert asyncio.get_running_loop().time() - began < 30
            assert "0 conversations, 1 could not be saved" in daemon.log()
            await fake.restart()
