"""Snapshot file names: bare, opaque, made by us alone: `kvp-<owner>-<unique>.kv`.

A name is never used for a second attempt: a save whose answer we gave up on may still be written later,
with whatever the slot holds by then.
"""

from __future__ import annotations

import re
import secrets

from kvproxy.identifiers import Owner, SnapshotName

OWNER_PATTERN = r"[0-9a-f]{8}"
NAME_PATTERN = rf"kvp-{OWNER_PATTERN}-[0-9a-f]{{24}}\.kv"
_OWNER = re.compile(OWNER_PATTERN)
_NAME = re.compile(NAME_PATTERN)


def new_owner() -> Owner:
    return Owner(secrets.token_hex(4))


def is_owner(text: str) -> bool:
    """Whether `new_owner` could have made it."""
    return _OWNER.fullmatch(text) is not None


def new_name(owner: Owner) -> SnapshotName:
    return SnapshotName(f"kvp-{owner}-{secrets.token_hex(12)}.kv")


def is_ours(filename: str) -> bool:
    """Whether a kvproxy could have made it; anything else in a save directory is not ours to touch."""
    return _NAME.fullmatch(filename) is not None


def is_of(owner: Owner, filename: str) -> bool:
    """Whether `new_name(owner)` could have made it."""
    return is_ours(filename) and filename.startswith(f"kvp-{owner}-")
