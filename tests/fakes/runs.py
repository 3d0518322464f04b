"""What became of each prompt: the fake's own log, against which anybody's claims can be held."""

from __future__ import annotations

from dataclasses import dataclass, field

TAG = "X-Request-Id"
"""The header by which a test knows its request again; it means nothing to anybody."""


@dataclass(slots=True, eq=False)
class Run:
    """One prompt in one slot. `held` is what that held as it began, of which `kept` tokens were reused;
    `left` what it holds at the end."""

    tag: str
    life: int
    """of the server, counted from 0"""
    slot: int
    prompt: list[int]
    held: list[int]
    was_restored: bool
    kept: int
    computed: int = 0
    left: list[int] = field(default_factory=list)
