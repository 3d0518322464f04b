from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.snapshots import canaries as module
from kvproxy.snapshots.canaries import Canaries, life_name, stand_in
from kvproxy.snapshots.canary import Canary

ONE = Canary.of([(1, -0.5), (2, -1.5)])
NEAR = Canary.of([(1, -0.50005), (2, -1.5)])
OTHER = Canary.of([(1, -0.7), (2, -1.5)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "canaries.json"


async def reopened(path: Path) -> Canaries:
    canaries = Canaries(path)
    assert await canaries.load() is None
    return canaries


async def test_a_canary_is_called_the_same_in_every_life_of_ours(path: Path) -> None:
    canaries = Canaries(path)
    assert await canaries.remember(ONE, "life", "") is None
    later = await reopened(path)
    assert later.name(ONE) == canaries.name(ONE)
    assert later.canary(later.name(ONE)) == ONE


async def test_one_that_hardly_differs_has_the_name_of_the_first_one(path: Path) -> None:
    canaries = Canaries(path)
    await canaries.remember(ONE, None, "")
    await canaries.remember(NEAR, None, "")
    assert (await reopened(path)).name(NEAR) == Canaries().name(ONE)
    assert canaries.canary(canaries.name(NEAR)) == ONE, "or names would wander"


async def test_one_that_differs_has_another_name() -> None:
    canaries = Canaries()
    await canaries.remember(ONE, None, "")
    assert canaries.name(OTHER) != canaries.name(ONE)


async def test_a_lost_file_changes_no_name() -> None:
    assert Canaries().name(ONE) == Canaries().name(ONE)


async def test_a_life_is_known_with_its_adapters(path: Path) -> None:
    canaries = Canaries(path)
    await canaries.remember(ONE, life_name("<__media_1__>"), "[a]")
    life = (await reopened(path)).life(life_name("<__media_1__>"))
    assert life is not None
    assert (life.canary, life.adapters) == (canaries.name(ONE), "[a]")
    assert canaries.life(life_name("<__media_2__>")) is None


async def test_a_stand_in_stands_for_the_canary_once_that_is_known() -> None:
    canaries = Canaries()
    assert canaries.canary(stand_in("life")) is None
    await canaries.remember(ONE, "life", "")
    assert canaries.canary(stand_in("life")) == ONE


@pytest.mark.parametrize("content", ["", "[]", "{", '{"schema_version": 2, "canaries": [], "lives": []}'])
async def test_a_file_that_is_something_else_is_told_and_written_anew(path: Path, content: str) -> None:
    path.write_text(content)
    canaries = Canaries(path)
    complaint = await canaries.load()
    assert complaint is not None
    await canaries.remember(ONE, None, "")
    assert (await reopened(path)).canary(canaries.name(ONE)) == ONE


async def test_a_canary_of_no_tokens_makes_no_file_of_ours(path: Path) -> None:
    path.write_text('{"schema_version": 1, "canaries": [{"name": "a", "logprobs": {}}], "lives": []}')
    assert await Canaries(path).load() is not None


async def test_a_directory_that_cannot_be_written_is_told_and_costs_nothing_now(tmp_path: Path) -> None:
    canaries = Canaries(tmp_path / "missing" / "canaries.json")
    complaint = await canaries.remember(ONE, "life", "")
    assert complaint is not None
    assert canaries.life("life") is not None


async def test_the_oldest_are_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LIVES", 2)
    monkeypatch.setattr(module, "MOST_CANARIES", 1)
    canaries = Canaries(path)
    for canary, life in ((ONE, "a"), (ONE, "b"), (ONE, "a"), (OTHER, "c")):
        await canaries.remember(canary, life, "")
    again = await reopened(path)
    assert [again.life(name) is not None for name in "abc"] == [True, False, True]
    assert again.canary(again.name(ONE)) is None
    assert again.canary(again.name(OTHER)) == OTHER


async def test_that_a_life_clears_idle_slots_is_kept_with_it(path: Path) -> None:
    canaries = Canaries(path)
    await canaries.remember(ONE, "clears", "")
    await canaries.remember(ONE, "keeps", "")
    assert await canaries.found_volatile("clears") is None
    assert await canaries.found_volatile("never met") is None
    await canaries.remember(OTHER, "clears", "[a]")
    lives = [(await reopened(path)).life(name) for name in ("clears", "keeps", "never met")]
    assert [life and life.is_volatile for life in lives] == [True, False, None]


async def test_a_list_from_before_that_was_kept_is_still_read(path: Path) -> None:
    canaries = Canaries(path)
    await canaries.remember(ONE, "life", "")
    path.write_text(path.read_text().replace(',\n   "is_volatile": false', ""))
    assert "is_volatile" not in path.read_text()
    life = (await reopened(path)).life("life")
    assert life is not None
    assert not life.is_volatile


async def test_what_was_seen_of_a_window_is_kept_with_its_life(tmp_path: Path) -> None:
    canaries = Canaries(tmp_path / "canaries.json")
    await canaries.remember(ONE, "life", "")
    assert await canaries.remember_window("life", True) is None
    assert await canaries.remember_window("never met", True) is None
    again = Canaries(tmp_path / "canaries.json")
    assert await again.load() is None
    life = again.life("life")
    assert life is not None
    assert (life.keeps_window, again.life("never met")) == (True, None)
