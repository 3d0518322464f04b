"""The operator's commands against a whole kvproxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvproxy.cli import main
from tests.fakes.llama_server import FakeLlamaServer
from tests.support.proxy import KvProxy, make_settings

TOKEN = "an operator's secret"

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeLlamaServer]:
    (tmp_path / "slots").mkdir()
    async with FakeLlamaServer(slot_dir=tmp_path / "slots") as server:
        yield server


@pytest.fixture
async def proxy(fake: FakeLlamaServer, tmp_path: Path) -> AsyncIterator[KvProxy]:
    settings = make_settings(fake.base_url, tmp_path / "state", tmp_path / "slots", admin={"token": TOKEN})
    async with KvProxy(settings) as running:
        await running.ready()
        yield running


@pytest.fixture
def run(proxy: KvProxy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command with the right token: exit code, stdout, stderr."""
    monkeypatch.setenv("KVPROXY_ADMIN__TOKEN", TOKEN)

    async def command(*argv: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, [*argv, "--url", proxy.base_url])
        return code, *capsys.readouterr()

    return command


async def talk(proxy: KvProxy, session: str) -> None:
    body = {"messages": [{"role": "user", "content": "tell me more " * 50}], "max_tokens": 4}
    answer = await proxy.post("/v1/chat/completions", body, X_Session_Id=session)
    assert answer.status == 200
    await proxy.at_rest()


async def as_json(run: Run, *argv: str) -> Any:
    code, out, _ = await run(*argv, "--json")
    assert code == 0
    return json.loads(out)


async def test_a_conversation_is_seen_saved_and_purged(proxy: KvProxy, run: Run, tmp_path: Path) -> None:
    await talk(proxy, "my chat")
    key = (await as_json(run, "sessions"))["sessions"][0]["session"]
    for command in ("status", "slots", "sessions"):
        code, out, err = await run(command)
        assert (code, err) == (0, "")
        assert key in out

    code, out, _ = await run("save", "my chat")
    assert (code, out.partition(":")[0]) == (0, "saved")
    assert (await run("save", key))[1].startswith("nothing to save")
    assert key in (await run("snapshots"))[1]
    assert len(list((tmp_path / "slots").iterdir())) == 1

    assert await run("invalidate", key) == (0, "1 snapshot will not be restored\n", "")
    assert "invalidated by an operator" in (await run("snapshots"))[1]

    assert await run("purge", "my chat") == (0, "1 conversation and 1 snapshot forgotten\n", "")
    assert list((tmp_path / "slots").iterdir()) == []
    assert (await as_json(run, "sessions"))["sessions"] == []


async def test_a_flush_saves_all_that_is_not_saved(proxy: KvProxy, run: Run) -> None:
    await talk(proxy, "one")
    await talk(proxy, "two")
    assert await run("flush") == (0, "2 saved, 0 failed\n", "")
    assert await run("flush") == (0, "0 saved, 0 failed\n", "")
    assert (await as_json(run, "status"))["snapshots"]["valid"] == 2


async def test_a_dry_collection_deletes_nothing(proxy: KvProxy, run: Run, tmp_path: Path) -> None:
    orphan = f"kvp-{proxy.runtime.store.owner}-{'0' * 24}.kv"
    (tmp_path / "slots" / orphan).write_bytes(b"what a kill left behind")
    assert await run("gc", "--dry-run") == (0, f"{orphan}\n1 snapshot would be deleted\n", "")
    assert (tmp_path / "slots" / orphan).exists()
    assert await run("gc") == (0, f"{orphan}\n1 snapshot deleted\n", "")
    assert list((tmp_path / "slots").iterdir()) == []


async def test_a_save_that_fails_says_why(fake: FakeLlamaServer, proxy: KvProxy, run: Run) -> None:
    await talk(proxy, "s")
    fake.faults.fail("save", "error")
    code, out, err = await run("save", "s")
    assert (code, out) == (1, "")
    assert err.startswith("kvproxy save: the save failed: ")


@pytest.mark.parametrize("command", ["save", "invalidate", "purge"])
async def test_an_unknown_session_is_one_line_that_says_where_to_look(run: Run, command: str) -> None:
    code, out, err = await run(command, "nobody")
    assert (code, out) == (1, "")
    assert err == (
        f"kvproxy {command}: no session 'nobody' is known: `kvproxy sessions` lists those that are\n"
    )


async def test_without_the_token_the_line_names_it(
    proxy: KvProxy, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVPROXY_ADMIN__TOKEN")
    code, _, err = await run("status")
    assert code == 1
    assert "KVPROXY_ADMIN__TOKEN" in err
    assert (await run("status", "--token", TOKEN))[0] == 0


async def test_a_llama_server_is_not_taken_for_kvproxy(
    fake: FakeLlamaServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, ["status", "--url", fake.base_url]) == 1
    assert "is not kvproxy" in capsys.readouterr().err


async def test_the_doctor_says_that_a_daemon_holds_the_state_directory(
    fake: FakeLlamaServer, proxy: KvProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--upstream", fake.base_url, "--state-dir", str(tmp_path / "state")]
    code = await asyncio.to_thread(main, ["doctor", *where])
    assert "held by a running kvproxy" in capsys.readouterr().out
    assert code == 0
