from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvproxy.snapshots.manifest import Manifest
from kvproxy.upstream.facts import KEY_ADVICE, SAVE_PATH_ADVICE, ServerState
from kvproxy.verdict import verdict_line
from tests.support.fakes_core import A, B, World, generation_of, manifest_of


@dataclass
class Known:
    settings: Any
    standing: Any
    store: Any


def verdict(
    world: World, *manifests: Manifest, quota: int = 10**9, fault: str | None = None, set_apart: int = 0
) -> tuple[int, str]:
    for manifest in manifests:
        world.keep(manifest)
    settings = SimpleNamespace(
        retention=SimpleNamespace(max_total_bytes=quota),
        upstreams=[SimpleNamespace(url="http://u", set_apart=set_apart)],
    )
    return verdict_line(cast(Any, Known(settings, world.standing, world.store)), fault)


def test_a_server_that_is_not_there_is_a_warning_with_the_reason() -> None:
    world = World()
    world.standing.set(state=ServerState.UNREACHABLE, reason="connection refused")
    line = "llama-server at http://u cannot be reached: connection refused"
    assert verdict(world) == (logging.WARNING, line)


def test_a_server_that_loads_is_a_warning() -> None:
    world = World()
    world.standing.set(state=ServerState.LOADING, reason="Loading model")
    assert verdict(world) == (logging.WARNING, "llama-server at http://u is loading: Loading model")


def test_a_server_that_does_not_tell_who_it_is_is_a_warning_with_the_reason() -> None:
    world = World()
    world.standing.set(state=ServerState.DEGRADED, reason=KEY_ADVICE, props=None)
    line = f"llama-server at http://u is degraded: {KEY_ADVICE}; conversations do not survive"
    assert verdict(world) == (logging.WARNING, line)


@pytest.mark.parametrize(("set_apart", "level"), [(1, logging.INFO), (2, logging.WARNING)])
def test_more_slots_set_apart_than_can_be_is_a_warning(set_apart: int, level: int) -> None:
    told, line = verdict(World(), set_apart=set_apart)
    assert told == level
    assert line.endswith("auxiliary_slots is 2, and one slot is left to conversations") == (set_apart == 2)


def test_a_snapshot_directory_that_cannot_be_used_is_a_warning_that_names_it() -> None:
    level, line = verdict(World(), fault="/gone: No such file or directory")
    assert level == logging.WARNING
    assert line.endswith(
        "conversations do not survive: snapshot_dir cannot be used: /gone: No such file or directory"
    )


def test_a_server_that_cannot_save_is_a_warning_that_names_the_flag() -> None:
    world = World()
    world.turn_off(SAVE_PATH_ADVICE)
    level, line = verdict(world)
    assert level == logging.WARNING
    assert line == f"2 slots, /models/one.gguf: conversations do not survive: {SAVE_PATH_ADVICE}"


def test_before_anything_was_saved_the_size_of_a_slot_is_not_known() -> None:
    level, line = verdict(World(), quota=5_000)
    assert level == logging.INFO
    assert line.endswith("the size of a full slot is known after the first save (quota 5.0 kB)")


def test_the_size_of_a_full_slot_is_reckoned_from_the_largest_save() -> None:
    large = manifest_of(A, generation_of(tokens=2048, size_bytes=2_048_000))
    small = manifest_of(B, generation_of(tokens=1, size_bytes=9_000_000))
    assert verdict(World(), large, small)[1].endswith("a full slot takes 4.1 MB of a quota of 1.0 GB")


def test_a_quota_that_cannot_hold_two_generations_is_said() -> None:
    saved = manifest_of(A, generation_of(tokens=4096, size_bytes=600))
    assert verdict(World(), saved, quota=1200)[1].endswith("a full slot takes 600 bytes of a quota of 1.2 kB")
    assert verdict(World(), saved, quota=1199)[1].endswith("which holds less than two generations of it")


@pytest.mark.parametrize(("quota", "shown"), [(999, "999 bytes"), (10**6, "1.0 MB"), (5 * 10**12, "5.0 TB")])
def test_sizes_are_told_in_units_a_person_reads(quota: int, shown: str) -> None:
    assert f"(quota {shown})" in verdict(World(), quota=quota)[1]
