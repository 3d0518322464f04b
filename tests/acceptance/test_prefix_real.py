"""A prompt that shares little with its snapshot, through kvproxy: only that is restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.telemetry.events import RestoreEnded
from tests.support.load import ask, client, words
from tests.support.proxy import KvProxy, make_settings
from tests.support.real import LlamaServer

pytestmark = pytest.mark.real

SESSION = {"X-Session-Id": "one"}


def body(*contents: str) -> dict[str, object]:
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    return {"model": "any", "messages": messages, "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize("flash_attention", ["on", "off"])
async def test_an_edited_turn_reads_only_what_it_shares(
    flash_attention: str, tiny_llama: Path, tmp_path: Path
) -> None:
    slots = tmp_path / "slots"
    slots.mkdir()
    opening, long = words("opening", 60), words("long", 400)
    flags = ("-c", "16384", "-np", "2", "--cache-ram", "0", "-fa", flash_attention)
    async with LlamaServer(tiny_llama, *flags, slot_dir=slots) as server:
        async with KvProxy(make_settings(server.base_url, tmp_path / "state", slots)) as proxy:
            proxy.runtime.restorer.cutter.least_seconds = 0  # the files are small here
            await proxy.ready()
            async with client(proxy.base_url) as session:
                await ask(session, body(opening, "Go on.", long), SESSION)
                await proxy.at_rest()
                await proxy.admin("POST", "flush")
                await proxy.at_rest()
                (file,) = slots.iterdir()
                size = file.stat().st_size
                await server.restart()
                short = body(opening, "Go on.", f"In short: {words('short', 10)}")
                answer = await ask(session, short, SESSION)
                await proxy.at_rest()
            (restored,) = proxy.heard(RestoreEnded)
        assert sorted(path.name for path in slots.iterdir()) == [file.name]
    assert (answer.status, answer.outcome) == (200, "restored")
    assert restored.tokens == answer.reused
    assert 300 < restored.tokens < answer.prompt
    assert restored.size_bytes < size / 3
