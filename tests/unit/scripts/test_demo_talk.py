from __future__ import annotations

import json

import pytest

from scripts.demo_talk import TOPICS, Answer, Conversation, Topic, answer_of, document, events_of


def stream(*events: object) -> list[bytes]:
    return [b"data: " + json.dumps(event).encode() + b"\n" for event in events] + [b"data: [DONE]\n", b"\n"]


def said(word: str | None, **more: object) -> dict[str, object]:
    return {"choices": [{"delta": {"content": word}}], **more}


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_a_document_is_long_and_always_the_same(topic: Topic) -> None:
    text = document(topic)
    assert text == document(topic)
    assert len(text.split()) >= 600  # a thousand tokens: numbers and rare words take several
    assert "{" not in text


def test_documents_have_nothing_in_common_beyond_a_few_words() -> None:
    beginnings = {document(topic)[:60] for topic in TOPICS}
    assert len(beginnings) == len(TOPICS)


def test_each_prompt_extends_the_one_before() -> None:
    conversation = Conversation(TOPICS[0])
    first = conversation.next_messages()
    conversation.answered(first, Answer(200, "Every minute.", 1000, 24, 1.0))
    second = conversation.next_messages()
    assert second[: len(first) + 1] == [*first, {"role": "assistant", "content": "Every minute."}]
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[-1] != first[-1]
    assert conversation.prompt_tokens == 1024


def test_events_are_read_from_the_lines_of_a_stream() -> None:
    assert list(events_of([b": ping\n", *stream({"a": 1}, {"b": 2})])) == [{"a": 1}, {"b": 2}]


def test_an_answer_is_its_words_its_counts_and_the_moment_of_its_first_word() -> None:
    events = [
        (0.5, said(None)),
        (1.5, said("Ev")),
        (1.6, said("ery")),
        (1.7, {"choices": [], "timings": {"prompt_n": 24, "cache_n": 1036}}),
    ]
    headers = {"X-KVProxy-Outcome": "restored"}
    assert answer_of(200, headers, events) == Answer(200, "Every", 24, 1036, 1.5, "restored", "")


def test_an_answer_without_words_or_counts_is_one_all_the_same() -> None:
    assert answer_of(200, {}, [(0.5, said(None))]) == Answer(200, "", 0, 0, 0.5)
    assert answer_of(503, {}, []) == Answer(503, "", 0, 0, 0.0)
