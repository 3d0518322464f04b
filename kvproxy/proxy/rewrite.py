"""The only edit ever made to a request body: two fields spliced in as bytes.

Nothing is parsed and written again, because that changes what the model sees: `1e3` becomes `1000.0`,
long integers lose digits, escapes and duplicate keys disappear. The server lets the last of duplicate
keys win, so fields before the final brace override whatever the client sent under the same names.
"""

from __future__ import annotations

from kvproxy.identifiers import SlotId

BOM = b"\xef\xbb\xbf"
"""The server reads past a UTF-8 byte order mark, so we do too."""

_SPACE = b" \t\n\r"
_WINDOW = 4096
"""More white space than this around a brace is no client's body, and scanning it would cost time."""


def can_splice(body: bytes) -> bool:
    """Whether `splice` will find its place."""
    return _seam(body) is not None


def splice(body: bytes, slot: SlotId, *, cache_prompt: bool = True) -> bytes | None:
    """`body` with `id_slot` added before its final brace; all other bytes as they were.

    With `cache_prompt` that field is added too, as true; a request that owns nothing keeps the client's word.
    `body` is taken to be valid JSON. None if it visibly is not one object.
    """
    seam = _seam(body)
    if seam is None:
        return None
    end, is_empty = seam
    comma = b"" if is_empty else b","
    fields = b'%b"id_slot":%d%b' % (comma, slot, _CACHE if cache_prompt else b"")
    return b"".join((memoryview(body)[:end], fields, memoryview(body)[end:]))


def _seam(body: bytes) -> tuple[int, bool] | None:
    """Where the object's final brace is, and whether the object is empty."""
    if body[:1] == b"{" and body[-1:] == b"}" and body[-2] not in _LOOKED_INTO:
        return len(body) - 1, False
    start = _first(body, len(BOM) if body.startswith(BOM) else 0)
    end = _last(body, len(body))
    if not start < end or body[start] != _OPEN or body[end] != _CLOSE:
        return None
    before = _last(body, end)
    if before < start or body[before] == _COMMA:
        return None
    return end, before == start


_OPEN, _CLOSE, _COMMA = b"{},"
_LOOKED_INTO = _SPACE + b"{,"
"""Before the last brace these need a second look; most clients write none of them there."""
_CACHE = b',"cache_prompt":true'


def _first(body: bytes, start: int) -> int:
    """Index of the first byte from `start` that is not white space; past the end if there is none near."""
    head = body[start : start + _WINDOW].lstrip(_SPACE)
    return min(start + _WINDOW, len(body)) - len(head) if head else len(body)


def _last(body: bytes, end: int) -> int:
    """Index of the last byte before `end` that is not white space; -1 if there is none near."""
    begin = max(0, end - _WINDOW)
    tail = body[begin:end].rstrip(_SPACE)
    return begin + len(tail) - 1 if tail else -1
