from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvproxy.snapshots.fingerprint import Fingerprint, fingerprint_of
from kvproxy.upstream.replies import Props

PROPS = Props(
    total_slots=2,
    n_ctx=8192,
    model_path="/models/one.gguf",
    model_alias="one",
    model_ftype="Q4_1",
    build="b11434-abc",
    marker="<__media_1__>",
    is_sleeping=False,
    modalities=("audio", "vision"),
)
META = {
    "n_vocab": 288,
    "n_ctx": 8192,
    "n_ctx_train": 262144,
    "n_embd": 64,
    "n_params": 184896,
    "size": 739584,
    "ftype": "Q4_1",
}
BASE = fingerprint_of(PROPS, META, "key")


@pytest.mark.parametrize(
    "changes",
    [{"marker": "<__media_2__>"}, {"n_ctx": 4096}, {"model_alias": "uno"}, {"is_sleeping": True}],
    ids=str,
)
def test_what_does_not_change_the_kv_does_not_change_the_fingerprint(changes: dict[str, Any]) -> None:
    other = fingerprint_of(replace(PROPS, **changes), META | {"n_ctx": 1}, "key")

    assert (BASE.digest, ()) == (other.digest, BASE.diff(other))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_path", "/models/two.gguf"),
        ("model_ftype", "F16"),
        ("build", "b11435"),
        ("total_slots", 3),
        ("modalities", ()),
    ],
)
def test_a_differing_property_is_named(field: str, value: object) -> None:
    other = fingerprint_of(replace(PROPS, **{field: value}), META, "key")

    assert (field,) == BASE.diff(other) == other.diff(BASE)
    assert BASE.digest != other.digest


@pytest.mark.parametrize("field", ["n_vocab", "n_ctx_train", "n_embd", "n_params", "size", "ftype"])
def test_a_differing_model_fact_is_named(field: str) -> None:
    other = fingerprint_of(PROPS, META | {field: 7}, "key")

    assert (f"meta_{field}",) == BASE.diff(other)
    assert BASE.digest != other.digest


def test_the_operators_own_mark_makes_old_snapshots_invisible() -> None:
    assert ("runtime_key",) == BASE.diff(fingerprint_of(PROPS, META, "another"))


def test_a_fact_the_server_does_not_tell_equals_an_empty_one() -> None:
    silent, empty = fingerprint_of(PROPS, {}, None), fingerprint_of(PROPS, dict.fromkeys(META), "")

    assert (silent.digest, ()) == (empty.digest, silent.diff(empty))


def test_a_field_added_empty_by_a_later_version_changes_no_digest() -> None:
    later = Fingerprint.from_dict(BASE.as_dict() | {"canary": ""})

    assert (BASE.digest, ()) == (later.digest, BASE.diff(later))


def test_the_digest_is_the_same_in_every_process() -> None:
    assert Fingerprint.from_dict({"b": "2", "a": "1"}).digest == "ddc7523b594d0dff"


def test_values_cannot_run_into_one_another() -> None:
    assert Fingerprint.from_dict({"a": "1b"}).digest != Fingerprint.from_dict({"a": "1", "b": ""}).digest
    assert Fingerprint.from_dict({"a": '1","b'}).digest != Fingerprint.from_dict({"a": "1", "b": "1"}).digest


def test_a_fingerprint_survives_the_way_through_a_dict() -> None:
    assert Fingerprint.from_dict(BASE.as_dict()) == BASE


def test_what_was_found_out_besides_is_part_of_it() -> None:
    plain = fingerprint_of(PROPS, {}, None)
    more = fingerprint_of(PROPS, {}, None, adapters="[a]", model_file="1:2", canary="c")
    assert more.diff(plain) == ("adapters", "canary", "model_file")
    assert (more.get("canary"), plain.get("canary"), plain.get("nothing")) == ("c", "", "")
    assert more.without("canary").diff(more) == ("canary",)
