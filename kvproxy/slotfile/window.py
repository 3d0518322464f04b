"""A sliding window, opened: a copy of a snapshot that the server goes on from without `--swa-full`.

After a restore the server wants the oldest position of the window to be lower than that of the oldest token
which the next one attends to. A file holds just the window, so its oldest cell stands exactly on the limit,
and nothing is ever reused. That cell is masked for every later token already: to give it the position one
lower changes no result, and the server accepts exactly the prompts that extend all of the snapshot.

That is so of windows that slide. In a chunked one the position decides which chunk a cell belongs to, in a
symmetric one tokens attend to later ones; and where the window is not whole, a cell that is attended to
would be moved. All of these are left alone.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvproxy.slotfile.copying import create_like, transfer
from kvproxy.slotfile.layout import Layout, Unknown, layout_of, read_layout
from kvproxy.slotfile.source import Source
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.opened import open_regular


class Closed(StrEnum):
    """Why a window is left as it is."""

    NOT_UNDERSTOOD = "not-understood"
    NO_WINDOW = "no-window"
    """Another kind of memory, or so few tokens that none has left the window."""
    OTHER_WINDOW = "other-window"
    """Its length is not the model's."""
    NOT_WHOLE = "not-whole"
    """Cells are missing, or one was moved already."""
    MEDIA = "media"
    """Pictures or sound, or positions of several parts: places and tokens are not the same there."""
    NO_ROOM = "no-room"
    """A copy is not known to fit on the disk."""
    NOT_WRITTEN = "not-written"
    """The copy could not be made."""


@dataclass(frozen=True, slots=True)
class Move:
    """The four bytes at `at` are to say `position`."""

    at: int
    position: int


def move_of(layout: Layout, window: int) -> Move | Closed:
    """What opens the window of a snapshot, `window` tokens long by the model's own word."""
    if layout.kind is not MemoryKind.SLIDING_WINDOW or layout.window is None:
        return Closed.NO_WINDOW
    if layout.media_chunks or layout.has_extended_cells:
        return Closed.MEDIA
    if layout.window != window:
        return Closed.OTHER_WINDOW
    whole, newest = (block.cells for block in layout.attention)
    spans = (whole.lowest, whole.highest + 1, newest.lowest, newest.highest + 1)
    if spans != (0, layout.tokens, layout.tokens - window, layout.tokens):
        return Closed.NOT_WHOLE
    if not (whole.is_gapless and newest.is_gapless):
        return Closed.NOT_WHOLE
    return Move(newest.lowest_at, newest.lowest - 1)


def open_window(source: Path, target: Path, window: int) -> Closed | None:
    """Write `target`, a copy of the snapshot `source` whose window is open; None if that was done.

    Blocks for as long as copying takes. `target` must not exist, and does not after a refusal. It is neither
    synced nor is its name.
    """
    try:
        return _open_window(source, target, window)
    except (OSError, ValueError):
        # A full disk, or a file that was taken from under us: the snapshot stays what it was.
        return Closed.NOT_WRITTEN


def _open_window(source: Path, target: Path, window: int) -> Closed | None:
    with open_regular(source) as file:
        layout = layout_of(Source(file))
        if isinstance(layout, Unknown):
            return Closed.NOT_UNDERSTOOD
        move = move_of(layout, window)
        if isinstance(move, Closed):
            return move
        descriptor = create_like(target, file.fileno())
        try:
            transfer(file.fileno(), 0, layout.file_bytes, descriptor)
            os.pwrite(descriptor, struct.pack("<i", move.position), move.at)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    if _is_open(read_layout(target), layout, move):
        return None
    target.unlink(missing_ok=True)
    return Closed.NOT_WRITTEN


def _is_open(found: Layout | Unknown, before: Layout, move: Move) -> bool:
    """Whether the copy is what was meant: the same, with one cell moved."""
    if isinstance(found, Unknown) or found.file_bytes != before.file_bytes:
        return False
    moved = found.attention[-1].cells
    same = (found.kind, found.window, found.tokens) == (before.kind, before.window, before.tokens)
    return same and (moved.lowest_at, moved.lowest) == (move.at, move.position)
