from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvproxy.doctor import examine as examine_module
from kvproxy.doctor.check import Readiness, Report, Result
from kvproxy.doctor.examine import examine
from kvproxy.settings.model import Settings
from tests.fakes.llama_server import FakeLlamaServer


def settings(url: str, tmp_path: Path, **upstream: Any) -> Settings:
    document = {"state_dir": str(tmp_path / "state"), "upstreams": [{"url": url, **upstream}]}
    return Settings.model_validate(document)


def results(report: Report) -> dict[str, str]:
    return {check.name: check.result.value for check in report.checks}


@pytest.fixture
def slot_dir(tmp_path: Path) -> Path:
    (tmp_path / "slots").mkdir()
    return tmp_path / "slots"


async def test_a_good_server_passes_every_check_in_order(tmp_path: Path, slot_dir: Path) -> None:
    async with FakeLlamaServer(slot_dir=slot_dir) as fake:
        wanted = settings(fake.base_url, tmp_path, snapshot_dir=str(slot_dir), memory_kind="full")
        report = await examine(wanted, wants_probe=True)
    assert [check.name for check in report.checks] == [
        "reachable",
        "llama-server",
        "sleep",
        "slots API",
        "save path",
        "slots",
        "draft model",
        "memory",
        "state directory",
        "save",
        "restore",
        "reuse",
        "probed memory",
        "mode",
        "window edit",
        "prefix cut",
        "snapshot directory",
        "idle slots",
        "size",
    ]
    assert results(report) == dict.fromkeys(results(report), "ok") | {"window edit": "skipped"}
    assert (report.readiness, report.is_proven) == (Readiness.READY, True)
    assert report.changes == ()


async def test_without_the_probe_nothing_is_touched(tmp_path: Path, slot_dir: Path) -> None:
    async with FakeLlamaServer(slot_dir=slot_dir) as fake:
        report = await examine(settings(fake.base_url, tmp_path), wants_probe=False)
        assert [call.method for call in fake.calls if call.path != "/slots/0"] == ["GET"] * 3
        assert [call.filename for call in fake.calls if call.path == "/slots/0"] == ["/"]
    assert (report.readiness, report.is_proven) == (Readiness.READY, False)
    assert list(slot_dir.iterdir()) == []


async def test_where_nothing_listens_it_is_unusable(tmp_path: Path) -> None:
    fake = FakeLlamaServer()
    async with fake:
        pass
    report = await examine(settings(fake.base_url, tmp_path), wants_probe=True)
    assert report.readiness is Readiness.UNUSABLE
    assert results(report)["probe"] == "skipped"


async def test_a_server_without_a_save_path_is_degraded_and_not_probed(tmp_path: Path) -> None:
    async with FakeLlamaServer() as fake:
        report = await examine(settings(fake.base_url, tmp_path), wants_probe=True)
        assert not any(call.path == "/completion" for call in fake.calls)
    assert report.readiness is Readiness.DEGRADED
    assert [change.what for change in report.changes] == ["llama-server --slot-save-path DIR"]


async def test_a_missing_key_is_named_and_the_right_one_used(tmp_path: Path, slot_dir: Path) -> None:
    async with FakeLlamaServer(slot_dir=slot_dir, api_key="right") as fake:
        without = await examine(settings(fake.base_url, tmp_path), wants_probe=True)
        with_key = await examine(settings(fake.base_url, tmp_path, api_key="right"), wants_probe=True)
    assert without.readiness is Readiness.DEGRADED
    assert without.changes[0].what.startswith("upstreams[].api_key")
    assert with_key.is_proven


async def test_a_sleeping_server_is_not_woken(tmp_path: Path, slot_dir: Path) -> None:
    async with FakeLlamaServer(slot_dir=slot_dir) as fake:
        fake.sleep()
        report = await examine(settings(fake.base_url, tmp_path), wants_probe=True)
        assert [call.path for call in fake.calls] == ["/props", "/v1/models"], "neither wakes it"
    assert report.readiness is Readiness.DEGRADED
    assert results(report)["probe"] == "skipped"


async def test_no_conversation_is_destroyed_for_the_probe(tmp_path: Path, slot_dir: Path) -> None:
    async with FakeLlamaServer(slot_dir=slot_dir, slots=1) as fake:
        fake.slots[0].tokens = [1, 2, 3]
        fake.slots[0].last_task = 7
        report = await examine(settings(fake.base_url, tmp_path), wants_probe=True)
        assert fake.slots[0].tokens == [1, 2, 3]
    assert (report.readiness, report.is_proven) == (Readiness.DEGRADED, False)
    assert "destroy a conversation" in report.verdict


async def test_a_context_too_small_for_the_probe_is_told(tmp_path: Path, slot_dir: Path) -> None:
    async with FakeLlamaServer(slot_dir=slot_dir, n_ctx=512) as fake:
        report = await examine(settings(fake.base_url, tmp_path), wants_probe=True)
    assert report.verdict == f"degraded: probe: {examine_module.TOO_NARROW}"


async def test_one_slot_is_enough(tmp_path: Path, slot_dir: Path) -> None:
    async with FakeLlamaServer(slot_dir=slot_dir, slots=1) as fake:
        report = await examine(settings(fake.base_url, tmp_path), wants_probe=True)
    assert report.readiness is Readiness.READY
    assert results(report)["idle slots"] == "skipped"


async def test_a_wrong_snapshot_directory_is_named_and_its_disk_not_measured(
    tmp_path: Path, slot_dir: Path
) -> None:
    async with FakeLlamaServer(slot_dir=slot_dir) as fake:
        wrong = settings(fake.base_url, tmp_path, snapshot_dir=str(tmp_path))
        report = await examine(wrong, wants_probe=True)
    (check,) = [check for check in report.checks if check.result is Result.DEGRADED]
    assert check.name == "snapshot directory"
    assert "free on the disk" not in str(report.checks)
    assert any(check.name == "probe file" for check in report.checks)


async def test_a_snapshot_directory_that_does_not_exist_is_a_warning(tmp_path: Path, slot_dir: Path) -> None:
    async with FakeLlamaServer(slot_dir=slot_dir) as fake:
        wrong = settings(fake.base_url, tmp_path, snapshot_dir=str(tmp_path / "gone"))
        report = await examine(wrong, wants_probe=False)
    (check,) = (check for check in report.checks if check.name == "snapshot directory")
    assert check.result is Result.DEGRADED
    assert check.detail.startswith(f"cannot be used: {tmp_path / 'gone'}: No such file or directory; create")
