"""Eight differently started servers, and what the doctor has to say of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvproxy.cli import main
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

GOOD = ("-c", "4096", "-np", "2", "--cache-ram", "0")


@dataclass(frozen=True)
class Patient:
    verdict: str
    flag: str | None
    """What is to be changed, in part."""
    memory: str | None
    """What is said of the model's memory, in part; None where nothing is."""
    mode: str | None
    model: str = "tiny_llama"
    flags: tuple[str, ...] = GOOD
    can_save: bool = True


PATIENTS = {
    "good": Patient("ready: conversations are saved and restored", None, "full attention", "plain"),
    "no save path": Patient(
        "degraded: save path", "llama-server --slot-save-path DIR", None, None, can_save=False
    ),
    "default flags": Patient(
        "degraded: idle slots: volatile", "--no-cache-idle-slots", "full attention", "plain", flags=()
    ),
    "unified": Patient(
        "degraded: idle slots: volatile",
        "--no-cache-idle-slots",
        "full attention",
        "plain",
        flags=("-c", "4096", "-np", "2", "--kv-unified"),
    ),
    "sliding window": Patient(
        "ready: conversations are saved and restored",
        None,
        "sliding window",
        "boundary",
        model="tiny_gemma3",
    ),
    "recurrent": Patient(
        "degraded: reuse: restore works for an exact continuation",
        "a model with full attention",
        "recurrent state",
        "boundary",
        model="tiny_mamba",
    ),
    "sleeping": Patient(
        "degraded: sleep: the server sleeps",
        None,
        None,
        None,
        flags=(*GOOD, "--sleep-idle-seconds", "1"),
    ),
}


async def examined(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    where = ["--upstream", url, "--state-dir", str(tmp_path / "state")]
    seen = ["--snapshot-dir", str(tmp_path / "slots")]
    code = await asyncio.to_thread(main, ["doctor", "--json", *where, *seen])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == report["exit_code"]
    return report


async def asleep(server: LlamaServer) -> None:
    async with asyncio.timeout(30):
        while not (await server.props())["is_sleeping"]:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("name", PATIENTS)
async def test_each_gets_its_verdict_and_the_flag_to_change(
    request: pytest.FixtureRequest, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patient = PATIENTS[name]
    (tmp_path / "slots").mkdir()
    slot_dir = tmp_path / "slots" if patient.can_save else None
    async with LlamaServer(
        request.getfixturevalue(patient.model), *patient.flags, slot_dir=slot_dir
    ) as server:
        if name == "sleeping":
            await asleep(server)
        report = await examined(server.base_url, tmp_path, capsys)
    details = {check["name"]: check["detail"] for check in report["checks"]}
    assert report["verdict"].startswith(patient.verdict), report
    flags = [change["change"] for change in report["changes"]]
    assert len(flags) == (patient.flag is not None)
    assert all(patient.flag in flag and change["reason"] for flag in flags for change in report["changes"])
    assert (patient.memory or "") in details.get("probed memory", "")
    assert ("probed memory" in details) == (patient.memory is not None)
    assert details.get("mode", "").partition(":")[0] == (patient.mode or "")
    assert ("stall" in details) == (patient.mode is not None)


@asynccontextmanager
async def something_else() -> AsyncIterator[str]:
    """A web server that is no llama-server."""

    async def greet(_: web.BaseRequest) -> web.Response:
        return web.Response(text="hello")

    runner = web.ServerRunner(web.Server(greet))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_wrong_url_is_unusable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slots").mkdir()
    async with something_else() as url:
        report = await examined(url, tmp_path, capsys)
    assert report["verdict"].startswith("unusable: llama-server")
    assert [change["change"] for change in report["changes"]] == ["upstreams[].url: URL"]
    report = await examined(url, tmp_path, capsys)
    assert report["verdict"].startswith("unusable: reachable")
    assert "upstreams[].url" in report["changes"][0]["change"]
