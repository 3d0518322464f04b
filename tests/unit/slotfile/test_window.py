from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from kvproxy.slotfile import window as window_module
from kvproxy.slotfile.layout import Layout, read_layout
from kvproxy.slotfile.window import Closed, Move, move_of, open_window
from tests.unit.slotfile import samples
from tests.unit.slotfile.samples import ALL, NEWEST, TOKENS, attention, recurrent, slot_file, word

WINDOW = len(NEWEST)
LOWEST = TOKENS - WINDOW
RANDOM_CASES = 500


def opened(data: bytes, tmp_path: Path, window: int = WINDOW) -> Closed | bytes:
    """The copy's content, or why there is none; the original is never touched."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(data)
    target.unlink(missing_ok=True)
    refusal = open_window(source, target, window)
    assert source.read_bytes() == data
    assert target.exists() == (refusal is None)
    return target.read_bytes() if refusal is None else refusal


@pytest.mark.parametrize("name", ["WINDOW", "WINDOW_IN_STREAMS"])
def test_nothing_changes_but_the_position_of_the_oldest_cell(name: str, tmp_path: Path) -> None:
    data = getattr(samples, name)

    copy = opened(data, tmp_path)

    assert isinstance(copy, bytes)
    layout = read_layout(tmp_path / "source")
    assert isinstance(layout, Layout)
    at = layout.attention[1].cells.at
    changed = data[:at] + word(LOWEST - 1) + data[at + 4 :]
    assert copy == changed


def test_the_oldest_cell_is_found_wherever_it_lies(tmp_path: Path) -> None:
    turned = [*NEWEST[3:], *NEWEST[:3]]
    data = slot_file(TOKENS, attention(ALL), attention(turned))

    copy = opened(data, tmp_path)

    assert copy == slot_file(
        TOKENS, attention(ALL), attention([LOWEST - 1 if one == LOWEST else one for one in turned])
    )


REFUSED = {
    "full attention": (samples.FULL, Closed.NO_WINDOW),
    "hybrid": (samples.HYBRID, Closed.NO_WINDOW),
    "hybrid with a window": (samples.HYBRID_WINDOW, Closed.NO_WINDOW),
    "recurrent": (samples.RECURRENT, Closed.NO_WINDOW),
    "unknown": (samples.KEY_INDEX, Closed.NO_WINDOW),
    "no token has left the window": (samples.WINDOW_NOT_FILLED, Closed.NO_WINDOW),
    "shorter than the window": (slot_file(5, attention(range(5)), attention(range(5))), Closed.NO_WINDOW),
    "a cell is missing": (
        slot_file(TOKENS, attention(ALL), attention(NEWEST[1:])),
        Closed.OTHER_WINDOW,
    ),
    "a cell too many": (
        slot_file(TOKENS, attention(ALL), attention(range(LOWEST - 1, TOKENS))),
        Closed.OTHER_WINDOW,
    ),
    "a cell in the middle is missing": (
        slot_file(TOKENS, attention(ALL), attention([LOWEST - 2, *NEWEST[:3], *NEWEST[4:]])),
        Closed.NOT_WHOLE,
    ),
    "a cell is there twice": (
        slot_file(TOKENS, attention(ALL), attention([*NEWEST[:3], NEWEST[2], *NEWEST[4:]])),
        Closed.NOT_WHOLE,
    ),
    "opened before": (
        slot_file(TOKENS, attention(ALL), attention([LOWEST - 1, *NEWEST[1:]])),
        Closed.NOT_WHOLE,
    ),
    "the context was shifted": (
        slot_file(TOKENS, attention(range(1, TOKENS + 1)), attention(range(LOWEST + 1, TOKENS + 1))),
        Closed.NOT_WHOLE,
    ),
    "media": (slot_file(TOKENS, attention(ALL), attention(NEWEST), media=[b"picture"]), Closed.MEDIA),
    "positions of several parts": (
        slot_file(TOKENS, attention(ALL, is_extended=True), attention(NEWEST, is_extended=True)),
        Closed.MEDIA,
    ),
    "another format": (
        slot_file(TOKENS, attention(ALL), attention(NEWEST), version=5),
        Closed.NOT_UNDERSTOOD,
    ),
    "cut short": (samples.WINDOW[:-1], Closed.NOT_UNDERSTOOD),
    "nothing": (b"", Closed.NOT_UNDERSTOOD),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_a_whole_window_is_left_as_it_is(case: str, tmp_path: Path) -> None:
    data, reason = REFUSED[case]
    assert opened(data, tmp_path) is reason


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, 0])
def test_a_window_of_another_length_than_the_models_is_left_as_it_is(window: int, tmp_path: Path) -> None:
    assert opened(samples.WINDOW, tmp_path, window) is Closed.OTHER_WINDOW


def test_a_name_that_is_taken_is_left_as_it_is(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(samples.WINDOW)
    target.write_bytes(b"somebody's")

    assert open_window(source, target, WINDOW) is Closed.NOT_WRITTEN
    assert target.read_bytes() == b"somebody's"


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(window_module, "transfer", full)

    assert opened(samples.WINDOW, tmp_path) is Closed.NOT_WRITTEN


def test_a_copy_that_is_not_what_was_meant_is_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_module.os, "pwrite", lambda *args: 4)

    assert opened(samples.WINDOW, tmp_path) is Closed.NOT_WRITTEN


def test_damaged_files_are_refused_or_opened_right(tmp_path: Path) -> None:
    """A flip in the rows is not seen, and does not matter here: the copy has the same rows."""
    chance = random.Random(5)
    for _ in range(RANDOM_CASES):
        data = bytearray(samples.WINDOW)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        copy = opened(bytes(data), tmp_path)
        if isinstance(copy, bytes):
            layout = read_layout(tmp_path / "source")
            assert isinstance(layout, Layout)
            assert move_of(layout, WINDOW) == Move(layout.attention[1].cells.at, LOWEST - 1)
            assert [at for at in range(len(data)) if copy[at] != data[at]] == [layout.attention[1].cells.at]


def test_a_recurrent_state_behind_the_window_is_no_window(tmp_path: Path) -> None:
    data = slot_file(TOKENS, attention(ALL), attention(NEWEST), recurrent(TOKENS - 1))
    assert opened(data, tmp_path) is Closed.NO_WINDOW
