from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.manifest import (
    FileIdentity,
    Manifest,
    Origin,
    Unreadable,
    client_digest,
    decode,
    encode,
    generation_to_restore,
    with_generation,
    without_generations,
)
from tests.unit.snapshots.samples import generation, manifest

FULL = manifest(
    current=generation(
        identity=FileIdentity(device=1, inode=2, size=100, mtime_ns=2**62, ctime_ns=4),
        sha256="0" * 64,
        origin=Origin(alteration=Alteration.WINDOW_EDIT, name=generation().name),
    ),
    previous=generation(invalid_reason="file is missing"),
)


@pytest.mark.parametrize("one", [manifest(), FULL], ids=["smallest", "fullest"])
def test_a_manifest_survives_the_way_through_bytes(one: Manifest) -> None:
    assert decode(encode(one)) == one


def changed(path: str, value: object) -> bytes:
    data: dict[str, Any] = json.loads(encode(FULL))
    *parents, last = path.split(".")
    place = data
    for parent in parents:
        place = place[parent]
    place[last] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema_version", 2),
        ("schema_version", "1"),
        ("key", "../../etc/passwd"),
        ("key", "a" * 32 + "\n"),
        ("current.name", "../other.kv"),
        ("current.name", "other.kv"),
        ("current.tokens", 0),
        ("current.tokens", "3"),
        ("current.tokens", True),
        ("current.size_bytes", -1),
        ("current.revision", -1),
        ("current.sha256", "abc"),
        ("current.origin.alteration", "sharpened"),
        ("current.origin.name", "../other.kv"),
        ("current.identity.inode", None),
        ("current.surprise", 1),
        ("current", None),
        ("fingerprint", ["build"]),
        ("fingerprint.build", 11434),
        ("last_used_at", float("nan")),
        ("surprise", 1),
    ],
)
def test_what_is_not_as_written_is_refused_by_the_name_of_its_field(path: str, value: object) -> None:
    found = decode(changed(path, value))

    assert isinstance(found, Unreadable)
    assert found.reason.startswith(path.rsplit(".", 1)[0] if path == "fingerprint.build" else path)


def test_a_manifest_that_does_not_say_its_version_is_refused() -> None:
    data = json.loads(encode(FULL))
    del data["schema_version"]

    assert decode(json.dumps(data).encode()) == Unreadable("no schema_version")


@given(st.binary() | st.text().map(str.encode) | st.integers(0, 900).map(lambda end: encode(FULL)[:end]))
def test_no_bytes_make_the_decoder_raise(data: bytes) -> None:
    assert isinstance(decode(data), Unreadable)


def test_the_clients_own_id_cannot_be_read_from_its_digest() -> None:
    digest = client_digest("my-secret-project")

    assert digest == client_digest("my-secret-project")
    assert "secret" not in digest
    assert len(digest) == 32


def test_a_client_id_that_is_not_text_has_a_digest_too() -> None:
    assert client_digest("\udcff") != client_digest("?")


def test_the_current_generation_is_restored_if_it_is_valid() -> None:
    one = manifest(previous=generation())

    assert generation_to_restore(one) is one.current


def test_the_previous_generation_is_restored_if_the_current_one_is_invalid() -> None:
    one = manifest(current=generation(invalid_reason="bad"), previous=generation())

    assert generation_to_restore(one) is one.previous


def test_nothing_is_restored_if_no_generation_is_valid() -> None:
    bad = generation(invalid_reason="bad")

    assert generation_to_restore(manifest(current=bad)) is None
    assert generation_to_restore(manifest(current=bad, previous=generation(invalid_reason="bad"))) is None


def test_a_change_reaches_the_generation_it_names_and_no_other() -> None:
    one = manifest(previous=generation())
    assert one.previous is not None

    after = with_generation(one, one.previous.name, sha256="1" * 64)

    assert after.previous == one.previous.model_copy(update={"sha256": "1" * 64})
    assert (after.current, one.previous.sha256) == (one.current, None)


def test_without_its_current_generation_the_previous_one_takes_its_place() -> None:
    one = manifest(previous=generation())

    after = without_generations(one, {one.current.name})

    assert after is not None
    assert (after.current, after.previous) == (one.previous, None)


def test_without_its_previous_generation_only_the_current_one_is_left() -> None:
    one = manifest(previous=generation())
    assert one.previous is not None

    after = without_generations(one, {one.previous.name})

    assert after == one.model_copy(update={"previous": None})


def test_without_any_generation_there_is_no_manifest() -> None:
    one = manifest()

    assert without_generations(one, {one.current.name}) is None
