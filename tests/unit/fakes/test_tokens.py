from __future__ import annotations

import pytest

from tests.fakes.tokens import BOS, common_prefix, detokenize, refrain, render_chat, tokenize


def test_one_byte_is_one_token_and_a_marker_is_one_too() -> None:
    assert len(tokenize("héllo", add_special=False)) == 6
    assert len(tokenize("<|im_start|>user", add_special=False)) == 5
    assert tokenize("")[:1] == [BOS]


def test_markers_are_plain_text_when_not_parsed() -> None:
    assert len(tokenize("<|im_end|>", add_special=False, parse_special=False)) == 10


def test_tokens_turn_back_into_their_text() -> None:
    text = "<|im_start|>user\nhé<|im_end|>"
    assert detokenize(tokenize(text, add_special=False)) == text


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [([], [1], 0), ([1, 2, 3], [1, 2, 3], 3), ([1, 2], [1, 2, 3], 2), ([1, 9, 3], [1, 2, 3], 1)],
)
def test_the_common_prefix_ends_at_the_first_difference(
    left: list[int], right: list[int], shared: int
) -> None:
    assert common_prefix(left, right) == common_prefix(right, left) == shared


def test_a_slot_says_the_last_canary_that_a_user_put_there() -> None:
    messages = [
        {"role": "user", "content": "CANARY-one"},
        {"role": "assistant", "content": "CANARY-on"},
        {"role": "user", "content": "CANARY-two please"},
        {"role": "assistant", "content": "CANARY-tw"},
    ]
    assert refrain(tokenize(render_chat(messages))) == b"CANARY-two "


def test_a_slot_without_a_canary_has_words_of_its_own() -> None:
    assert refrain(tokenize("nothing here")) == b"lorem "


def test_a_continued_conversation_extends_what_was_rendered_before() -> None:
    first = [{"role": "user", "content": "a"}]
    longer = [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert render_chat(longer).startswith(render_chat(first))


def test_typed_content_is_joined_and_tools_come_first() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = render_chat([{"role": "user", "content": parts}], tools=[{"name": "f"}])
    assert text.startswith('<|im_start|>tools\n[{"name": "f"}]<|im_end|>\n<|im_start|>user\na\nb<|im_end|>')
