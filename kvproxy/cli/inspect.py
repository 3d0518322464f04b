"""`kvproxy inspect`: what snapshot files hold, read from the files alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvproxy.cli.table import table
from kvproxy.slotfile.blocks import TYPE_NAMES, AttentionBlock, Block, RecurrentBlock
from kvproxy.slotfile.head import Head, read_head
from kvproxy.slotfile.layout import Layout, Unknown, read_layout
from kvproxy.slotfile.prefix import obstacle_to_cutting
from kvproxy.slotfile.window import Closed, move_of
from kvproxy.snapshots.opened import open_regular

NAME = "inspect"
HELP = (
    "Show what snapshot files hold: format, memory, tokens, window, streams, layers, types, and what can be "
    "done to them. Reads the files alone. Exit 0 if all of them were understood, 1 if not."
)

Json = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file that llama-server saved")
    parser.add_argument("--json", action="store_true", help="print a JSON array, one object for each file")


def run(args: argparse.Namespace) -> int:
    found = [inspected(path) for path in args.files]
    print(json.dumps(found, indent=1) if args.json else "\n\n".join(as_text(one) for one in found))
    return 0 if all(one["understood"] for one in found) else 1


def inspected(path: Path) -> Json:
    """Everything that can be told of a file. Blocks, for up to a second."""
    layout = read_layout(path)
    if isinstance(layout, Unknown):
        told = {"file": str(path), "understood": False, "reason": layout.reason}
        return told | _of_head(read_head(path)) | _of_refusal(path)
    return {"file": str(path), "understood": True} | _of_layout(layout)


def _of_head(head: Head | None) -> Json:
    return {} if head is None else {"version": head.version, "tokens": head.tokens}


def _of_refusal(path: Path) -> Json:
    """Why a file cannot be opened, in the system's words."""
    try:
        with open_regular(path):
            return {}
    except OSError as error:
        return {"detail": error.strerror}
    except ValueError as error:
        return {"detail": str(error)}


def _of_layout(layout: Layout) -> Json:
    return {
        "format": layout.format,
        "memory": layout.kind,
        "tokens": layout.tokens,
        "bytes": layout.file_bytes,
        "media_chunks": layout.media_chunks,
        "window": layout.window,
        "streams": layout.streams,
        "m_rope_cells": layout.has_extended_cells,
        "window_edit": _window_edit(layout),
        "prefix_cut": obstacle_to_cutting(layout) or "possible",
        "blocks": [_of_block(block) for block in layout.blocks],
    }


def _window_edit(layout: Layout) -> str:
    """As far as the file tells: whether the window slides is a matter of the model."""
    move = move_of(layout, layout.window or 0)
    if isinstance(move, Closed):
        is_open = _has_open_window(layout)
        return "open" if is_open else move
    return "possible"


def _has_open_window(layout: Layout) -> bool:
    if layout.window is None or len(layout.attention) != 2:
        return False
    cells = layout.attention[1].cells
    return (cells.lowest, cells.highest) == (layout.tokens - layout.window - 1, layout.tokens - 1)


def _of_block(block: Block) -> Json:
    if isinstance(block, RecurrentBlock):
        types = {TYPE_NAMES.get(state.type_id, str(state.type_id)) for state in block.states}
        return {
            "block": "recurrent",
            "cells": 1,
            "positions": [block.position, block.position],
            "layers": block.layers,
            "layers_with_state": len(block.states) // 2,
            "types": sorted(types),
            "bytes": block.end - block.at,
        }
    return _of_attention(block)


def _of_attention(block: AttentionBlock) -> Json:
    return {
        "block": "attention",
        "stream": block.stream,
        "cells": block.cells.count,
        "positions": [block.cells.lowest, block.cells.highest],
        "gapless": block.cells.is_gapless,
        "layers": block.layers,
        "key_type": _type_name(block.key_type),
        "value_type": _type_name(block.value_type),
        "values_transposed": block.is_transposed,
        "rotation": [block.key_rotation, block.value_rotation],
        "bytes": block.end - block.at,
    }


def _type_name(number: int | None) -> str | None:
    return None if number is None else TYPE_NAMES.get(number, str(number))


def as_text(found: Json) -> str:
    plain = [(name, _shown(value)) for name, value in found.items() if name != "blocks"]
    parts = [table(("FACT", "VALUE"), plain)]
    for number, block in enumerate(found.get("blocks", [])):
        rows = [(name, _shown(value)) for name, value in block.items()]
        parts.append(table((f"BLOCK {number}", ""), rows))
    return "\n".join(parts)


def _shown(value: object) -> object:
    return " to ".join(str(one) for one in value) if isinstance(value, list) else value
