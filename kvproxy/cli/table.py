"""Columns of text for people."""

from __future__ import annotations

from collections.abc import Sequence

GAP = "  "


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned columns as wide as what they hold, None as a dash; the last one is not padded."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    return "\n".join(_line(row, widths) for row in cells)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return GAP.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
