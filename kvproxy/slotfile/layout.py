"""What a slot file holds, block by block, without reading its keys and values.

Strict on purpose: others restore, edit and cut files by what is found here, so whatever is not exactly as
llama-server writes it, down to the last byte, is Unknown, and hands stay off.

What the bytes cannot tell:
- Whether the server ran with `--swa-full`: it saves the same window either way.
- The size of the window while no token has left it: both attention blocks then hold every token. Then they
  are told from the key index of a sparse-attention model by their rows, which have one shape; where they
  differ the kind is UNKNOWN.
- That blocks are missing from a file that was cut exactly between two of them: what is left is a whole file
  of another kind. `expected_bytes` rules that out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path

from kvproxy.slotfile.blocks import (
    MOST_TOKENS,
    AttentionBlock,
    Block,
    RecurrentBlock,
    readings_at,
)
from kvproxy.slotfile.head import HEAD_BYTES, Head, parse_head
from kvproxy.slotfile.source import Source, Unlike
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.opened import open_regular

VERSION = 4
"""The only version whose blocks we know; a server reads and writes exactly one."""
MOST_BLOCKS = 3
MOST_MEDIA = 65_536
_PLAIN_IDS_AT = 12
_WORD_BYTES = 4


class Format(StrEnum):
    """The formats whose blocks we know."""

    PACKED_4 = "4-packed"
    """Token ids and media chunks under a mark."""
    PLAIN_4 = "4-plain"
    """A bare list of token ids, as older builds wrote it under the same version."""


class Reason(StrEnum):
    """Why a file is not understood."""

    UNREADABLE = "unreadable"
    """Absent, a link, no regular file, or not ours to read."""
    NOT_A_SLOT_FILE = "not-a-slot-file"
    OTHER_FORMAT = "other-format"
    OTHER_SIZE = "other-size"
    NO_TOKENS = "no-tokens"
    """An empty slot's file; it shows no kind."""
    TOO_MANY_TOKENS = "too-many-tokens"
    NOT_UNDERSTOOD = "not-understood"
    """Damaged, cut short, followed by something, or written by a memory we do not know."""
    AMBIGUOUS = "ambiguous"
    """The bytes can be read in two ways to the end."""


@dataclass(frozen=True, slots=True)
class Unknown:
    reason: Reason


@dataclass(frozen=True, slots=True)
class Layout:
    """Every byte of the file is accounted for. Places are counted in bytes from the start of the file.

    `window` is how many cells the window block holds, None without one and while it still holds every token.
    For a chunked window these are the tokens of the newest chunk.
    """

    format: Format
    tokens: int
    token_ids_at: int
    media_chunks: int
    blocks: tuple[Block, ...]
    kind: MemoryKind
    window: int | None
    file_bytes: int

    @property
    def attention(self) -> tuple[AttentionBlock, ...]:
        return tuple(block for block in self.blocks if isinstance(block, AttentionBlock))

    @property
    def streams(self) -> int | None:
        """KV streams of the server (1 where its slots share one); None if the file has no attention."""
        return self.attention[0].streams if self.attention else None

    @property
    def has_extended_cells(self) -> bool:
        """M-RoPE positions (or token ids for n-gram embeddings) beside each cell's own position."""
        return any(block.cells.is_extended for block in self.attention)


def read_layout(path: Path, expected_bytes: int | None = None) -> Layout | Unknown:
    """Never raises. Blocks: up to a second for millions of tokens, whatever the size of the file.

    `expected_bytes` is the size the file had when it was whole, if that is on record.
    """
    try:
        with open_regular(path) as file:
            return layout_of(Source(file), expected_bytes)
    except (OSError, ValueError):  # ValueError: a path with a null character
        return Unknown(Reason.UNREADABLE)


def read_token_ids(path: Path, limit: int = MOST_TOKENS) -> array[int] | None:
    """The first `limit` token ids, -1 where media stands; None if it is no slot file we know. Blocks."""
    try:
        with open_regular(path) as file:
            source = Source(file)
            head = _read_head(source)
            if isinstance(head, Unknown):
                return None
            return source.integers(_token_ids_at(head), min(_tokens_of(head), max(limit, 0)))
    except (OSError, ValueError, Unlike):  # unreadable, or shorter than its head says
        return None


def layout_of(source: Source, expected_bytes: int | None = None) -> Layout | Unknown:
    """The same of a file that is open already. OSError if it cannot be read."""
    head = _read_head(source)
    if isinstance(head, Unknown):
        return head
    if expected_bytes is not None and expected_bytes != source.size:
        return Unknown(Reason.OTHER_SIZE)
    try:
        media_chunks = _count_media(source, head)
    except Unlike:
        return Unknown(Reason.NOT_UNDERSTOOD)
    found = list(islice(_readings(source, head.token_block_end, _tokens_of(head)), 2))
    if not found or source.is_spent:
        return Unknown(Reason.NOT_UNDERSTOOD)
    if len(found) > 1:
        return Unknown(Reason.AMBIGUOUS)
    return _layout(source, head, media_chunks, found[0])


def _layout(source: Source, head: Head, media_chunks: int, blocks: tuple[Block, ...]) -> Layout:
    tokens = _tokens_of(head)
    return Layout(
        format=Format.PLAIN_4 if _is_plain(head) else Format.PACKED_4,
        tokens=tokens,
        token_ids_at=_token_ids_at(head),
        media_chunks=media_chunks,
        blocks=blocks,
        kind=_kind_of(blocks),
        window=_window_of(blocks),
        file_bytes=source.size,
    )


def _read_head(source: Source) -> Head | Unknown:
    try:
        head = parse_head(source.read(0, min(HEAD_BYTES, source.size)))
    except Unlike:
        return Unknown(Reason.UNREADABLE)
    if head is None:
        return Unknown(Reason.NOT_A_SLOT_FILE)
    if head.version != VERSION:
        return Unknown(Reason.OTHER_FORMAT)
    if not head.tokens:
        return Unknown(Reason.NO_TOKENS)
    return head if head.tokens <= MOST_TOKENS else Unknown(Reason.TOO_MANY_TOKENS)


def _tokens_of(head: Head) -> int:
    assert head.tokens is not None, "the head of a format we know"
    return head.tokens


def _is_plain(head: Head) -> bool:
    """Whether the token block is nothing but ids: a packed one has four words more."""
    return head.token_block_end == _PLAIN_IDS_AT + _tokens_of(head) * _WORD_BYTES


def _token_ids_at(head: Head) -> int:
    return _PLAIN_IDS_AT if _is_plain(head) else HEAD_BYTES


def _count_media(source: Source, head: Head) -> int:
    """The media chunks behind the token ids, whose sizes must fill the token block."""
    if _is_plain(head):
        return 0
    at = HEAD_BYTES + _tokens_of(head) * _WORD_BYTES
    (chunks,) = source.unpack("<I", at)
    if chunks > min(_tokens_of(head), MOST_MEDIA):
        raise Unlike
    at += _WORD_BYTES * (1 + chunks)
    for _ in range(chunks):
        (size,) = source.unpack("<I", at)
        if not size:
            raise Unlike
        at += _WORD_BYTES + size
    if not 0 <= head.token_block_end - at < _WORD_BYTES:
        raise Unlike
    return int(chunks)


def _readings(
    source: Source, at: int, tokens: int, before: tuple[Block, ...] = ()
) -> Iterator[tuple[Block, ...]]:
    """Every way to read the file from `at` to its last byte."""
    if at == source.size:
        if before:
            yield before
        return
    if len(before) == MOST_BLOCKS:
        return
    for block in readings_at(source, at):
        blocks = (*before, block)
        if _may_stand_together(blocks, tokens):
            yield from _readings(source, block.end, tokens, blocks)


def _may_stand_together(blocks: tuple[Block, ...], tokens: int) -> bool:
    first, last = blocks[0], blocks[-1]
    if isinstance(first, RecurrentBlock):  # without attention every layer has a state
        return len(blocks) == 1 and len(first.states) == 2 * first.layers
    if last is first:
        return first.cells.count == tokens
    if isinstance(last, RecurrentBlock):
        return last.position == first.cells.highest and not isinstance(blocks[-2], RecurrentBlock)
    if isinstance(blocks[-2], RecurrentBlock):  # only a key index follows a state, and it has no V
        return not last.values and _belongs_to(first, last)
    return _agree_on_values(first, last) and _belongs_to(first, last)


def _agree_on_values(first: AttentionBlock, later: AttentionBlock) -> bool:
    return not (first.layers and later.layers) or bool(first.values) == bool(later.values)


def _belongs_to(first: AttentionBlock, later: AttentionBlock) -> bool:
    """Blocks of one sequence: what is newest in one is newest in the other."""
    cells, others = first.cells, later.cells
    same_server = (first.streams, first.stream, cells.sequence) == (
        later.streams,
        later.stream,
        others.sequence,
    )
    return same_server and others.count <= cells.count and others.highest == cells.highest


def _kind_of(blocks: tuple[Block, ...]) -> MemoryKind:
    match blocks:
        case (RecurrentBlock(),):
            return MemoryKind.RECURRENT
        case (AttentionBlock(),):
            return MemoryKind.FULL
        case (AttentionBlock() as whole, AttentionBlock() as later) if _is_window(whole, later):
            return MemoryKind.SLIDING_WINDOW
        case (AttentionBlock(), *_) if any(isinstance(block, RecurrentBlock) for block in blocks):
            return MemoryKind.HYBRID
        case _:
            return MemoryKind.UNKNOWN


def _is_window(whole: AttentionBlock, later: AttentionBlock) -> bool:
    return later.cells.count < whole.cells.count or whole.row_shapes == later.row_shapes


def _window_of(blocks: tuple[Block, ...]) -> int | None:
    counts = [block.cells.count for block in blocks if isinstance(block, AttentionBlock)]
    return counts[-1] if counts and counts[-1] < counts[0] else None
