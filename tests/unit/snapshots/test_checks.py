from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvproxy.snapshots import checks
from kvproxy.snapshots.access import SNAPSHOT_DIR
from kvproxy.snapshots.checks import check_saved, check_stored, digest_of, make_durable
from kvproxy.snapshots.manifest import Generation
from kvproxy.upstream.replies import Saved
from tests.unit.snapshots.samples import generation, packed_file

TOKENS = [5, 6, 7]
DATA = packed_file(TOKENS)


def claim(data: bytes = DATA, tokens: int = len(TOKENS)) -> Saved:
    return Saved(tokens=tokens, size_bytes=len(data))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.kv"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def stored(file: Path) -> Generation:
    """As published: seen and hashed."""
    check = check_saved(file, claim())
    assert check.is_ok
    return generation(size_bytes=len(DATA), identity=check.identity, sha256=hashlib.sha256(DATA).hexdigest())


def rewrite(file: Path, data: bytes) -> None:
    """The same inode with other bytes, and times that moved."""
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))


def move_identity(file: Path) -> None:
    """The same bytes in another inode, as a copied directory would have them."""
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)


def test_a_file_as_claimed_is_ok_and_left_as_it_was(file: Path) -> None:
    file.chmod(0o644)

    assert check_saved(file, claim()).is_ok
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_file_that_is_kept_is_private(file: Path) -> None:
    file.chmod(0o644)

    assert make_durable(file).is_ok
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_good_file_and_its_name_are_made_to_last(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(checks.os, "fsync", recorded)

    assert make_durable(file).is_ok
    assert synced == [file.stat().st_ino, file.parent.stat().st_ino]


def test_the_identity_is_that_of_the_file_as_it_was_left(file: Path) -> None:
    check = make_durable(file)

    seen = file.stat()
    assert check.identity is not None
    assert check.identity.model_dump() == {
        "device": seen.st_dev,
        "inode": seen.st_ino,
        "size": seen.st_size,
        "mtime_ns": seen.st_mtime_ns,
        "ctime_ns": seen.st_ctime_ns,
    }


@pytest.mark.parametrize(
    ("data", "saved", "reason"),
    [
        (DATA[:-1], claim(), "bytes instead of"),
        (DATA[: len(DATA) // 2], claim(), "bytes instead of"),
        (b"", claim(), "0 bytes instead of"),
        (DATA + b"x", claim(), "bytes instead of"),
        (DATA, claim(tokens=4), "holds 3 tokens instead of 4"),
        (packed_file([1]), claim(packed_file([1]), tokens=3), "holds 1 tokens instead of 3"),
        (packed_file([], state=b"\0" * 12), Saved(0, 40), "no tokens"),
        (bytes(len(DATA)), claim(), "begin like a slot file"),
        (packed_file(TOKENS, state=b""), claim(packed_file(TOKENS, state=b"")), "before its KV state"),
    ],
    ids=["byte", "half", "emptied", "longer", "more", "fewer", "empty slot", "zeros", "no state"],
)
def test_a_file_that_is_not_as_claimed_is_refused(file: Path, data: bytes, saved: Saved, reason: str) -> None:
    file.write_bytes(data)

    check = check_saved(file, saved)

    assert reason in check.reason
    assert (check.is_ok, check.identity) == (False, None)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert check_saved(tmp_path / "a", claim()).reason == "file is missing"
    assert check_stored(tmp_path / "a", generation()) == checks.FileCheck("file is missing")


def test_where_the_directory_is_not_there_nothing_is_said_of_its_files(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    reason = f"{absent}: No such file or directory; create it or bring it back, or {SNAPSHOT_DIR}"
    assert check_stored(absent / "a", generation()) == checks.FileCheck(reason, is_out_of_sight=True)


def test_where_another_file_system_is_mounted_nothing_is_said_of_what_it_lacks(
    file: Path, stored: Generation
) -> None:
    assert stored.identity is not None
    elsewhere = stored.identity.model_copy(update={"device": stored.identity.device + 1})
    file.unlink()

    check = check_stored(file, stored.model_copy(update={"identity": elsewhere}))

    reason = f"{file.parent}: another file system is there now"
    assert check == checks.FileCheck(reason, is_out_of_sight=True)


def test_a_link_to_a_good_file_is_refused(file: Path, stored: Generation) -> None:
    link = file.with_name("link")
    link.symlink_to(file)

    assert not check_saved(link, claim()).is_ok
    assert not check_stored(link, stored).is_ok


def test_a_file_of_a_newer_format_is_judged_by_its_size(file: Path) -> None:
    file.write_bytes(packed_file(TOKENS, version=5))

    assert check_saved(file, claim(tokens=99)).is_ok
    assert not check_saved(file, Saved(3, 7)).is_ok


def test_a_file_of_another_user_that_cannot_be_made_private_is_ok(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(checks.os, "fchmod", refuse)

    assert check_saved(file, claim()).is_ok


def test_an_error_of_the_disk_is_a_reason(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checks.os, "fsync", fail)

    assert make_durable(file).reason == "cannot read file: Input/output error"


def test_an_untouched_file_is_ok_without_being_read(
    file: Path, stored: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "parse_head", None)
    monkeypatch.setattr(checks.hashlib, "file_digest", None)

    assert check_stored(file, stored) == checks.FileCheck(identity=stored.identity)


def test_a_moved_file_with_the_same_content_is_ok_and_its_new_identity_told(
    file: Path, stored: Generation
) -> None:
    move_identity(file)

    check = check_stored(file, stored)

    assert check.is_ok
    assert check.identity is not None
    assert check.identity != stored.identity
    assert check_stored(file, stored.model_copy(update={"identity": check.identity})).is_ok


def test_another_sessions_file_of_the_same_size_is_refused(file: Path, stored: Generation) -> None:
    rewrite(file, packed_file([5, 6, 8]))

    assert check_stored(file, stored).reason == "file content changed: the digest differs"


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-1], lambda data: data[: len(data) // 2], lambda data: b""], ids=str
)
def test_a_shortened_file_is_refused(file: Path, stored: Generation, spoil: Callable[[bytes], bytes]) -> None:
    rewrite(file, spoil(DATA))

    assert "bytes instead of" in check_stored(file, stored).reason


def test_a_changed_file_whose_digest_was_never_learned_is_refused(file: Path, stored: Generation) -> None:
    move_identity(file)

    check = check_stored(file, stored.model_copy(update={"sha256": None}))

    assert check.reason == "file changed and no digest is known"


def test_a_file_seen_for_the_first_time_is_judged_by_size_and_head(file: Path) -> None:
    unseen = generation(size_bytes=len(DATA))

    assert check_stored(file, unseen).is_ok
    assert check_stored(file, unseen).identity is not None
    assert not check_stored(file, unseen.model_copy(update={"tokens": 4})).is_ok


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    file: Path, stored: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_identity(file)
    monkeypatch.setattr(checks, "_sha256", lambda opened: (os.utime(file, ns=(1, 1)), stored.sha256)[1])

    assert check_stored(file, stored).reason == "file changed while it was read"


def test_the_digest_is_that_of_the_whole_file(file: Path) -> None:
    file.write_bytes(os.urandom(3_000_000))

    assert digest_of(file, None) == hashlib.sha256(file.read_bytes()).hexdigest()


def test_there_is_no_digest_for_a_file_that_is_not_the_one_published(file: Path, stored: Generation) -> None:
    assert digest_of(file, stored.identity) == stored.sha256

    move_identity(file)

    assert digest_of(file, stored.identity) is None


def test_there_is_no_digest_for_a_file_that_changes_meanwhile(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_sha256", lambda opened: (os.utime(file, ns=(1, 1)), "0" * 64)[1])

    assert digest_of(file, None) is None


def test_there_is_no_digest_for_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert digest_of(tmp_path / "a", None) is None
