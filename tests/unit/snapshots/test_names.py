from __future__ import annotations

import pytest

from kvproxy.snapshots.names import is_ours, new_name


def test_no_two_names_are_equal() -> None:
    assert len({new_name() for _ in range(1000)}) == 1000


def test_a_new_name_is_one_of_ours() -> None:
    assert is_ours(new_name())


@pytest.mark.parametrize(
    "name",
    [
        "",
        "other.kv",
        "kvp-" + "0" * 31 + ".kv",
        "kvp-" + "0" * 32 + ".kv\n",
        "kvp-" + "0" * 32 + ".kv.json",
        "kvp-" + "A" * 32 + ".kv",
        "../kvp-" + "0" * 32 + ".kv",
        "kvp-" + "٠" * 32 + ".kv",
    ],
)
def test_a_file_we_could_not_have_named_is_not_ours(name: str) -> None:
    assert not is_ours(name)
