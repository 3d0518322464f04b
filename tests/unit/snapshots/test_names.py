from __future__ import annotations

import pytest

from kvproxy.identifiers import Owner
from kvproxy.snapshots.names import is_of, is_ours, is_owner, new_name, new_owner

OWNER = Owner("0123abcd")


def test_no_two_names_are_equal() -> None:
    assert len({new_name(OWNER) for _ in range(1000)}) == 1000


def test_a_new_name_is_one_of_ours() -> None:
    assert is_ours(new_name(OWNER))


def test_a_new_name_is_its_owners_and_nobody_elses() -> None:
    name = new_name(OWNER)
    assert (is_of(OWNER, name), is_of(Owner("0123abce"), name)) == (True, False)


def test_what_only_begins_like_a_name_of_an_owner_is_not_its_file() -> None:
    assert not is_of(OWNER, f"kvp-{OWNER}-notes.kv")


def test_a_new_owner_is_one_and_no_two_are_equal() -> None:
    made = {new_owner() for _ in range(100)}
    assert len(made) == 100
    assert all(is_owner(one) for one in made)


@pytest.mark.parametrize("text", ["", "0123abc", "0123abcde", "0123ABCD", "0123abcd\n", "../../.."])
def test_what_nobody_made_is_no_owner(text: str) -> None:
    assert not is_owner(text)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "other.kv",
        "kvp-" + "0" * 32 + ".kv",
        "kvp-" + "0" * 8 + "-" + "0" * 23 + ".kv",
        "kvp-" + "0" * 8 + "-" + "0" * 24 + ".kv\n",
        "kvp-" + "0" * 8 + "-" + "0" * 24 + ".kv.json",
        "kvp-" + "0" * 8 + "-" + "A" * 24 + ".kv",
        "../kvp-" + "0" * 8 + "-" + "0" * 24 + ".kv",
        "kvp-" + "٠" * 8 + "-" + "0" * 24 + ".kv",
    ],
)
def test_a_file_we_could_not_have_named_is_not_ours(name: str) -> None:
    assert not is_ours(name)
