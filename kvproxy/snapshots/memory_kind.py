"""What kind of memory a model keeps its context in, which decides what a restored snapshot is good for."""

from __future__ import annotations

from enum import StrEnum


class MemoryKind(StrEnum):
    FULL = "full"
    """Every layer attends to every token: a slot can be cut back to any of its tokens."""
    SLIDING_WINDOW = "sliding-window"
    """Some layers keep only the newest tokens; what fell out of the window is gone."""
    HYBRID = "hybrid"
    """Attention in some layers, one running state in others; the state knows no way back."""
    RECURRENT = "recurrent"
    """One running state in every layer."""
    UNKNOWN = "unknown"
    """Not shown to be any of them. Treated as append-only: the other way round answers could be wrong."""

    @property
    def may_roll_back(self) -> bool:
        """Whether a prompt that leaves the snapshot before its end can still use it."""
        return self is MemoryKind.FULL

    @property
    def is_append_only(self) -> bool:
        return not self.may_roll_back

    @property
    def needs_boundary(self) -> bool:
        """Whether a snapshot is best taken where every next request goes on, not where the answer ended."""
        return self in (MemoryKind.HYBRID, MemoryKind.RECURRENT)


def kind_of_setting(word: str) -> MemoryKind | None:
    """`upstreams[].memory_kind`; None for `auto`."""
    return None if word == "auto" else MemoryKind(word.replace("_", "-"))


def kind_from(layout: MemoryKind | None, gguf: MemoryKind | None, setting: MemoryKind | None) -> MemoryKind:
    """The kind by the best evidence there is.

    `layout` was read from a slot file: what the server really keeps, so it comes first. `gguf` is what the
    model file promises; flags and builds may make something else of it. `setting` is the operator's word.
    None and UNKNOWN are no evidence.
    """
    evidence = (layout, gguf, setting)
    return next((kind for kind in evidence if kind and kind is not MemoryKind.UNKNOWN), MemoryKind.UNKNOWN)
