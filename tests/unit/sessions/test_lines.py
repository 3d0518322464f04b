"""How a request relates to a conversation that is known."""

from __future__ import annotations

import random

import pytest

from kvproxy.dialects.reading import BLOCK_BYTES, MOST_ENTRIES, Reading
from kvproxy.sessions.lines import TELLING_BYTES, Kind
from tests.support.chats import asked, line, raw

GOES_ON, EDITED, REWRITTEN = Kind.CONTINUED, Kind.EDITED, Kind.REWRITTEN
KNOWN = "S:s U:a A:b U:c"
BLOCK = "x" * BLOCK_BYTES


def kind(known: str | Reading, request: str | Reading) -> Kind | None:
    relation, end = asked(request).relation(line(known)), line(known)
    if relation is None:
        return REWRITTEN if set(end.traces) & set(asked(request).traces()) else None
    return relation.kind


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (f"{KNOWN} A:d U:e", GOES_ON),
        (KNOWN, GOES_ON),
        ("S:s U:a A:b U:other", EDITED),
        ("S:s U:a A:b", EDITED),
        ("S:s U:a", EDITED),
        ("S:s U:other", None),
        ("S:s U:other A:b U:c", None),
        ("S:s", None),
        ("S:another U:a", None),
        ("U:a A:b U:c", REWRITTEN),
        ("S:later U:a A:b U:c A:d U:e", REWRITTEN),
        ("S:s U:a A:reworded U:c A:d U:e", REWRITTEN),
        ("S:s U:a A:different U:question", None),
        ("S:s U:c A:d U:e", None),
    ],
)
def test_a_chat_relates_to_a_known_one(request_: str, expected: Kind | None) -> None:
    assert kind(KNOWN, request_) is expected


def test_a_reply_that_was_begun_for_the_model_may_come_back_whole() -> None:
    assert kind("S:s U:a A:beg", "S:s U:a A:begun U:c") is GOES_ON
    assert kind("S:s U:a", "S:s U:a A:beg") is GOES_ON
    assert kind("S:s A:hello", "S:s A:hello U:a") is GOES_ON


def test_a_window_that_slides_over_a_long_chat_shows_the_same_chat() -> None:
    long, short = "x" * TELLING_BYTES, "y"
    for reply, expected in ((long, REWRITTEN), (short, None)):
        said = [f"U:{n} A:{reply}{n}" for n in range(12)]
        whole, window = f"S:s {' '.join(said[:9])} U:9", f"S:s {' '.join(said[5:10])} U:10"
        assert kind(whole, window) is expected


def test_what_is_said_in_every_chat_makes_no_two_of_them_one() -> None:
    usual = "A:ok U:continue A:ok U:continue"
    assert kind(f"S:s U:a {usual}", f"S:s U:b {usual} A:ok U:continue") is None


def test_what_is_shared_is_counted_in_entries() -> None:
    known = line(KNOWN)
    assert [known.shared(line(text)) for text in ("S:s", "S:s U:a A:x", f"{KNOWN} A:d", "U:a")] == [
        1,
        2,
        4,
        0,
    ]
    relation = asked("S:s U:a A:b U:x").relation(known)
    assert relation is not None
    assert relation.shared == 3


def test_what_is_shared_is_found_at_every_length() -> None:
    chooser = random.Random(4)
    for _ in range(200):
        one = [f"U:{chooser.randrange(3)}" for _ in range(chooser.randrange(1, 12))]
        other = [f"U:{chooser.randrange(3)}" for _ in range(chooser.randrange(1, 12))]
        same = next(
            (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        assert line(" ".join(one)).shared(line(" ".join(other))) == same


def test_the_opening_is_the_same_in_every_request_of_a_chat_and_no_other() -> None:
    openings = {line(text).opening for text in ("S:s U:a", KNOWN, f"{KNOWN} A:d U:e")}
    assert len(openings) == 1
    assert line("S:s U:other").opening not in openings


def test_sizes_add_up() -> None:
    known = line("S:sss U:aaaa A:b U:c")
    assert [known.bytes_of(n) for n in (1, 2, 3)] == [5, 9, 10]  # a system prompt is kept in quotes
    assert known.bytes_of(0) == 0


def test_another_secret_gives_another_chain_throughout() -> None:
    one, other = asked(KNOWN).line, asked(KNOWN, b"t" * 32).line
    assert not {one.link(n) for n in range(1, 5)} & {other.link(n) for n in range(1, 5)}
    assert one.traces != other.traces


@pytest.mark.parametrize(
    ("known", "request_", "expected"),
    [
        (BLOCK + "tail", BLOCK + "tail and more", GOES_ON),
        (BLOCK + "tail", BLOCK + "tail", GOES_ON),
        (BLOCK + "tail", BLOCK + "tail" + BLOCK * 3, GOES_ON),
        (BLOCK * 4, BLOCK * 4 + "more", GOES_ON),
        (BLOCK + "tail", BLOCK + "other", EDITED),
        (BLOCK * 4 + "tail", BLOCK * 3 + "other", EDITED),
        (BLOCK * 4, BLOCK + "y" * BLOCK_BYTES * 3, None),
        (BLOCK * 4, "y" * BLOCK_BYTES * 4, None),
    ],
)
def test_a_raw_prompt_relates_to_a_known_one(known: str, request_: str, expected: Kind | None) -> None:
    assert kind(raw(known), raw(request_)) is expected


def test_of_a_conversation_beyond_all_measure_the_beginning_tells() -> None:
    whole = raw(BLOCK * (MOST_ENTRIES + 3))
    assert kind(whole, raw(BLOCK * (MOST_ENTRIES + 3) + "more")) is GOES_ON
    assert line(whole).rest_bytes == 0


def test_a_line_shows_no_word() -> None:
    assert b"secret" not in repr(line("S:secret U:secret")).encode()
