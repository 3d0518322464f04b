"""Two kvproxies, each with a state directory of its own, before one server and one snapshot directory."""

from __future__ import annotations

from pathlib import Path

from kvproxy.snapshots.names import new_name, new_owner
from tests.support.proxy import House, KvProxy, house, make_settings
from tests.support.talk import Talk


async def saved(proxy: KvProxy, name: str) -> set[str]:
    """Serve a conversation and flush it; the files that are named by manifests of this proxy."""
    await proxy.turn(Talk(name))
    assert (await proxy.admin("POST", "flush")).body["failed"] == 0
    return set(proxy.runtime.store.names())


def second(here: House, tmp_path: Path) -> KvProxy:
    return KvProxy(make_settings(here.fake.base_url, tmp_path / "other state", here.slot_dir))


def names(here: House) -> set[str]:
    return {path.name for path in here.files}


async def test_neither_sweeps_the_others_files(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        ours = await saved(here.proxy, "alpha")
        async with second(here, tmp_path) as other:
            await other.ready()
            assert await other.runtime.keeper.sweep() == ()
            theirs = await saved(other, "beta")

            assert await here.proxy.runtime.keeper.sweep() == ()
            assert names(here) == ours | theirs


async def test_at_start_it_removes_what_its_last_life_left_and_nothing_else(tmp_path: Path) -> None:
    async with house(tmp_path) as here:
        kept = await saved(here.proxy, "alpha")
        left = here.slot_dir / new_name(here.proxy.runtime.store.owner)
        others = {new_name(new_owner()), "by-hand.kv"}
        for name in (left.name, *others):
            (here.slot_dir / name).write_bytes(b"kv")

        await here.proxy.restart()
        await here.proxy.until(lambda: not left.exists())

        assert names(here) == kept | others
