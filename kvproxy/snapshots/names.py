"""Snapshot file names: bare, opaque, made by us alone.

A name is never used for a second attempt: a save whose answer we gave up on may still be written later,
with whatever the slot holds by then.
"""

from __future__ import annotations

import re
import secrets

from kvproxy.identifiers import SnapshotName

NAME_PATTERN = r"kvp-[0-9a-f]{32}\.kv"
_NAME = re.compile(NAME_PATTERN)


def new_name() -> SnapshotName:
    return SnapshotName(f"kvp-{secrets.token_hex(16)}.kv")


def is_ours(filename: str) -> bool:
    """Whether `new_name` could have made it; anything else in a save directory is not ours to touch."""
    return _NAME.fullmatch(filename) is not None
