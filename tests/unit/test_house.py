from __future__ import annotations

import asyncio
from pathlib import Path

from kvproxy.house import House
from kvproxy.settings.load import resolve


async def test_nothing_starts_and_nothing_is_written_while_the_parts_are_put_together(tmp_path: Path) -> None:
    state = tmp_path / "state"
    running = len(asyncio.all_tasks())
    house = House(
        resolve(
            {"upstreams": [{"name": "main", "url": "http://127.0.0.1:9"}], "state_dir": str(state)},
            environ={},
        )
    )
    assert len(asyncio.all_tasks()) == running
    assert not state.exists()
    assert not house.is_started
