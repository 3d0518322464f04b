"""The ids of the house, as types that cannot be passed for one another."""

from __future__ import annotations

from typing import NewType

ServerName = NewType("ServerName", str)
"""The name of an upstream in the settings."""

SlotId = NewType("SlotId", int)
"""A llama-server slot number, 0 to N-1 of the server's present life."""

SessionKey = NewType("SessionKey", str)
"""32 hex digits: a conversation's stable name (server, tenant, model, client's id and branch, hashed)."""

Revision = NewType("Revision", int)
"""Counts the times a session's KV may have changed."""

Epoch = NewType("Epoch", int)
"""One life of the upstream process as far as slots are concerned; 0 is before the first."""

SnapshotName = NewType("SnapshotName", str)
"""The file name of a snapshot in the server's save directory; opaque, never used twice."""

Owner = NewType("Owner", str)
"""8 hex digits in the name of every snapshot of one state directory: two of them may share a save directory,
and neither may sweep away the other's files."""

SHORT_KEY_DIGITS = 12


def short(key: SessionKey) -> str:
    """The 12 digits shown in headers, logs and the admin face."""
    return key[:SHORT_KEY_DIGITS]
