"""The turn that a slot's content comes from, as far as finding its boundary needs it."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.boundary.continuations import Document, Ending
from kvproxy.identifiers import Revision


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as its prompt is made of it: `label` is the endpoint's."""

    label: str
    document: Document


@dataclass(frozen=True, slots=True)
class Turn:
    """Held in memory only, for a session that lives in a slot of a server whose memory cannot roll back.

    `prompt_tokens` is what the server told; `revision` the session's after it.
    """

    asked: Asked
    ended: Ending
    prompt_tokens: int | None
    revision: Revision
