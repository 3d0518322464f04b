"""Each contract test runs against the fake and, marked `real`, against a real llama-server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.subject import Flags, Subject, fake_server, real_server
from tests.fakes.llama_server import FakeLlamaServer
from tests.support.real import LlamaServer


@pytest.fixture
def flags() -> Flags:
    """Overridden by `@pytest.mark.parametrize("flags", [Flags(...)])`."""
    return Flags()


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.real)])
async def server(request: pytest.FixtureRequest, flags: Flags, tmp_path: Path) -> AsyncIterator[Subject]:
    slot_dir = tmp_path / "slots"
    slot_dir.mkdir()
    process: FakeLlamaServer | LlamaServer
    if request.param == "fake":
        process = fake_server(flags, slot_dir)
    else:
        process = real_server(flags, slot_dir, request.getfixturevalue("tiny_llama"))
    await process.start()
    headers = {"Authorization": f"Bearer {flags.api_key}"} if flags.api_key else {}
    subject = Subject(process, slot_dir, flags, headers)
    try:
        yield subject
    finally:
        await subject.end()
