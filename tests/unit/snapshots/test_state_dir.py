from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvproxy.errors import StateDirError
from kvproxy.identifiers import SnapshotName
from kvproxy.snapshots.lock import StateLock
from kvproxy.snapshots.manifest import Manifest, encode
from kvproxy.snapshots.names import is_owner
from kvproxy.snapshots.state_dir import MAX_MANIFEST_BYTES, StateDir, file_name
from tests.unit.snapshots.samples import FINGERPRINT, KEY, OTHER_KEY, generation, manifest
from tests.unit.snapshots.steps import STEPS, Crash, crash_at, fail_at


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    made = StateDir(tmp_path / "deep" / "state")
    made.prepare()
    return made


def put(state: StateDir, name: str, data: bytes) -> Path:
    path = state.path / "manifests" / name
    path.write_bytes(data)
    return path


def found(state: StateDir) -> tuple[tuple[Manifest, ...], tuple[SnapshotName, ...], tuple[str, ...]]:
    loaded = state.load()
    return loaded.manifests, loaded.restoring, loaded.complaints


def test_the_directories_are_made_private_and_making_them_again_is_harmless(state: StateDir) -> None:
    state.prepare()

    made = [state.path, *state.path.iterdir()]
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}
    assert found(state) == ((), (), ())


def test_a_state_directory_under_a_file_is_named_with_the_mend(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"")

    for path in (file, file / "state"):
        with pytest.raises(
            StateDirError, match=f"{file}: Not a directory; move that file away, or set state_dir"
        ):
            StateDir(path).prepare()


def test_a_file_in_the_place_of_a_part_of_it_is_named_itself(tmp_path: Path) -> None:
    (tmp_path / "manifests").write_bytes(b"")

    with pytest.raises(StateDirError, match="/manifests: Not a directory; move that file away"):
        StateDir(tmp_path).prepare()


def test_a_state_directory_that_cannot_be_read_is_an_error(state: StateDir) -> None:
    (state.path / "manifests").rmdir()

    with pytest.raises(StateDirError, match=r"cannot read state directory .*/manifests: .*; create it"):
        state.load()


def test_what_was_written_is_loaded(state: StateDir) -> None:
    one, other = manifest(), manifest(key=OTHER_KEY, previous=generation())

    assert (state.write(one), state.write(other)) == (None, None)

    assert found(state) == ((one, other), (), ())


def test_what_was_removed_is_not_loaded_and_removing_it_again_is_no_failure(state: StateDir) -> None:
    one = manifest()
    state.write(one)

    assert (state.remove(one), state.remove(one)) == (None, None)

    assert state.load().manifests == ()


def test_temp_files_of_a_crash_are_removed_and_not_complained_about(state: StateDir) -> None:
    put(state, ".a.json.0011.tmp", b"half")

    assert found(state) == ((), (), ())
    assert os.listdir(state.path / "manifests") == []


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Invalid JSON"),
        (encode(manifest())[:100], "Invalid JSON"),
        (encode(manifest()).replace(b'"schema_version": 1', b'"schema_version": 2'), "schema_version"),
        (b" " * (MAX_MANIFEST_BYTES + 1), "larger than"),
        (encode(manifest(key=OTHER_KEY)), "its name should be"),
    ],
    ids=["empty", "torn", "newer", "large", "renamed"],
)
def test_what_is_no_manifest_is_put_aside_with_its_reason_and_the_others_stay(
    state: StateDir, data: bytes, reason: str
) -> None:
    good = manifest(key=OTHER_KEY)
    state.write(good)
    bad = put(state, file_name(manifest()), data)

    loaded = state.load()

    assert loaded.manifests == (good,)
    assert [reason in complaint for complaint in loaded.complaints] == [True]
    assert bad.name in loaded.complaints[0]
    assert not bad.exists()
    assert (state.path / "quarantine" / bad.name).read_bytes() == data


def test_what_is_not_even_a_file_is_put_aside_too(state: StateDir) -> None:
    os.mkfifo(state.path / "manifests" / "pipe.json")
    (state.path / "manifests" / "directory.json").mkdir()
    elsewhere = state.path / "elsewhere"
    elsewhere.write_bytes(encode(manifest()))
    (state.path / "manifests" / file_name(manifest())).symlink_to(elsewhere)

    loaded = state.load()

    assert ["not a regular file" in complaint for complaint in loaded.complaints] == [True] * 3
    assert os.listdir(state.path / "manifests") == []


def test_what_cannot_be_put_aside_is_ignored_with_a_complaint(state: StateDir) -> None:
    put(state, "bad.json", b"")
    (state.path / "quarantine").rmdir()

    (complaint,) = state.load().complaints

    assert "is ignored" in complaint


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_the_old_manifest_or_the_new(tmp_path: Path, step: str) -> None:
    old, new = manifest(), manifest(model="two")
    state = StateDir(tmp_path)
    state.prepare()
    state.write(old)

    with pytest.raises(Crash):
        StateDir(tmp_path, observe=crash_at(step)).write(new)

    expected = new if step in ("renamed", "settled") else old
    assert found(state) == ((expected,), (), ())
    assert os.listdir(tmp_path / "manifests") == [file_name(old)]


@pytest.mark.parametrize("step", STEPS)
def test_a_failed_write_says_so_exactly_if_the_old_manifest_stands(tmp_path: Path, step: str) -> None:
    old, new = manifest(), manifest(model="two")
    state = StateDir(tmp_path)
    state.prepare()
    state.write(old)

    reason = StateDir(tmp_path, observe=fail_at(step)).write(new)

    assert state.load().manifests == ((new if reason is None else old),)
    assert reason is None or "No space left on device" in reason


def test_a_failed_removal_says_so(state: StateDir) -> None:
    path = state.path / "manifests" / file_name(manifest())
    path.mkdir()

    assert "cannot remove" in str(state.remove(manifest()))


def test_a_mark_stands_until_it_is_cleared(state: StateDir) -> None:
    name, other = generation().name, generation().name

    assert (state.mark_restoring(name), state.mark_restoring(other)) == (None, None)
    assert state.clear_restoring(other) is None

    assert state.load().restoring == (name,)
    assert (state.clear_restoring(name), state.clear_restoring(name)) == (None, None)
    assert state.load().restoring == ()


def test_a_mark_that_cannot_be_made_or_cleared_is_a_reason(state: StateDir) -> None:
    (state.path / "restoring").rmdir()
    (state.path / "restoring").write_bytes(b"")
    name = generation().name

    assert "Not a directory" in str(state.mark_restoring(name))
    assert "Not a directory" in str(state.clear_restoring(name))


def test_a_mark_that_is_not_one_of_ours_is_ignored(state: StateDir) -> None:
    (state.path / "restoring" / "other").touch()

    assert state.load().restoring == ()


def test_a_manifest_is_called_by_its_session_and_fingerprint() -> None:
    assert file_name(manifest()) == f"{KEY}-{FINGERPRINT.digest}.json"


def test_an_owner_is_made_once_and_found_again(state: StateDir, tmp_path: Path) -> None:
    owner = state.load().owner

    other = StateDir(tmp_path / "other")
    other.prepare()

    assert is_owner(owner)
    assert state.load().owner == owner
    assert other.load().owner != owner
    assert (state.path / "owner").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", [b"", b"../../..", b"\xff" * 100, b"0123abcd" * 50])
def test_an_owner_file_that_says_nothing_useful_is_made_anew(state: StateDir, text: bytes) -> None:
    (state.path / "owner").write_bytes(text)

    owner = state.load().owner

    assert is_owner(owner)
    assert state.load().owner == owner


def test_an_owner_that_cannot_be_written_serves_for_this_life_and_is_complained_about(
    state: StateDir,
) -> None:
    (state.path / "owner").mkdir()

    loaded = state.load()

    assert is_owner(loaded.owner)
    assert loaded.complaints == ()
    assert loaded.owner_failure == f"cannot write {state.path / 'owner'}: Is a directory"


class TestWhyUnusable:
    def test_one_that_can_be_used_shows_nothing(self, tmp_path: Path) -> None:
        directory = StateDir(tmp_path / "state")
        directory.prepare()
        assert directory.why_unusable(None) == ""

    @pytest.mark.parametrize("part", ["manifests", "restoring"])
    def test_one_of_which_a_part_is_gone_is_named_with_what_to_do(self, tmp_path: Path, part: str) -> None:
        directory = StateDir(tmp_path / "state")
        directory.prepare()
        (tmp_path / "state" / part).rmdir()
        reason = directory.why_unusable(None)
        assert reason.startswith(f"cannot use state directory {tmp_path / 'state'}: ")
        assert part in reason
        assert reason.endswith("create it or bring it back, or set state_dir to another directory")
        (tmp_path / "state" / part).write_bytes(b"")
        assert "Not a directory" in directory.why_unusable(None)

    def test_another_one_in_its_place_is_not_taken_for_it(self, tmp_path: Path) -> None:
        directory = StateDir(tmp_path / "state")
        directory.prepare()
        with StateLock.acquire(directory.path) as lock:
            assert directory.why_unusable(lock) == ""
            directory.path.rename(tmp_path / "away")
            assert "is gone or another one" in directory.why_unusable(lock)
            directory.prepare()
            with StateLock.acquire(directory.path):
                assert "is gone or another one" in directory.why_unusable(lock)
        assert "is gone or another one" in directory.why_unusable(lock), "it was given back"
