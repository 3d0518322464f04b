"""What is said in the demo, and how: three long documents, and streamed answers to questions about them."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ANSWER_TOKENS = 16
ANSWER_SECONDS = 300.0
"""A prompt of a thousand tokens on a slow and busy machine, with room."""

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Topic:
    """`sentences` have places for `{thing}`, `{part}` and `{number}`."""

    name: str
    opening: str
    sentences: tuple[str, ...]
    things: tuple[str, ...]
    parts: tuple[str, ...]
    clauses: int = 46


SPECIFICATION = Topic(
    "specification",
    "You answer questions about this specification of an irrigation controller.",
    (
        "The {thing} shall report its {part} to the station every {number} seconds.",
        "If the {part} of the {thing} is lost for {number} seconds, the valve shall close.",
        "An operator may override the {thing} for {number} minutes; its {part} is logged meanwhile.",
        "The {thing} shall keep {number} days of {part} without power.",
    ),
    ("north pump", "soil probe", "rain gauge", "pressure valve", "flow meter", "solar charger"),
    ("temperature", "pressure", "clock", "firmware version", "calibration", "battery level"),
)
INCIDENT = Topic(
    "incident",
    "You answer questions about this report of an outage.",
    (
        "At minute {number} the {thing} stopped answering and its {part} rose without bound.",
        "{number} minutes later an engineer restarted the {thing}; the {part} did not recover.",
        "The {thing} retried {number} times against the same {part}, which made the queue longer.",
        "A graph of the {part} shows that the {thing} had been slow for {number} minutes before.",
    ),
    ("payment service", "message broker", "primary database", "login page", "load balancer", "search index"),
    ("error rate", "connection pool", "disk queue", "memory use", "certificate", "replication lag"),
)
JOURNAL = Topic(
    "journal",
    "You answer questions about this journal of a walk along a coast.",
    (
        "On day {number} we reached the {thing} before noon and rested beside the {part}.",
        "The {thing} lay {number} miles ahead, hidden by the {part} until late in the evening.",
        "Nobody we met knew the {thing}, though an old map shows {number} houses and the {part}.",
        "We counted {number} herons near the {thing} while the {part} dried in the wind.",
    ),
    ("lighthouse", "chapel on the cliff", "harbour wall", "salt meadow", "ferry landing", "ruined mill"),
    ("stone bridge", "fishing nets", "morning fog", "narrow stair", "blue boats", "tide pools"),
)
TOPICS = (SPECIFICATION, INCIDENT, JOURNAL)


def document(topic: Topic) -> str:
    """The same words at every call; a thousand tokens and more."""
    chooser = random.Random(topic.name)
    return "\n".join([topic.opening, *(_clause(topic, n, chooser) for n in range(1, topic.clauses + 1))])


def _clause(topic: Topic, number: int, chooser: random.Random) -> str:
    sentence = topic.sentences[(number - 1) % len(topic.sentences)]
    words = {"thing": chooser.choice(topic.things), "part": chooser.choice(topic.parts)}
    return f"{number}. {sentence.format(**words, number=chooser.randrange(2, 90))}"


@dataclass(slots=True)
class Conversation:
    """A topic and what was said of it. `prompt_tokens` is the length of the last prompt, 0 before it."""

    topic: Topic
    messages: list[Message] = field(default_factory=list)
    asked: int = 0
    prompt_tokens: int = 0

    def next_messages(self) -> list[Message]:
        """The history with the next question at its end."""
        history = self.messages or [{"role": "system", "content": document(self.topic)}]
        thing = self.topic.things[self.asked % len(self.topic.things)]
        return [*history, {"role": "user", "content": f"In one sentence, what is said about the {thing}?"}]

    def answered(self, messages: list[Message], answer: Answer) -> None:
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.asked += 1
        self.prompt_tokens = answer.computed + answer.reused


@dataclass(frozen=True, slots=True)
class Answer:
    """`computed` and `reused` are prompt tokens as llama-server counted them; `outcome` and `reason` are what
    kvproxy said in its headers, empty without it."""

    status: int
    text: str
    computed: int
    reused: int
    first_word_seconds: float
    outcome: str = ""
    reason: str = ""


def ask(port: int, session: str, messages: list[Message]) -> Answer:
    """One streamed answer of whoever listens on a port of this machine. Raises OSError or HTTPException."""
    body = {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json", "X-Session-Id": session}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        events = [(time.perf_counter() - began, event) for event in events_of(response)]
        return answer_of(response.status, dict(response.getheaders()), events)
    finally:
        connection.close()


def events_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream, as they come."""
    for line in lines:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def answer_of(status: int, headers: Mapping[str, str], events: list[tuple[float, dict[str, Any]]]) -> Answer:
    """`events` with the seconds at which each came."""
    words = [(at, word) for at, event in events if (word := _word(event))]
    timings: dict[str, Any] = next((event["timings"] for _, event in events if "timings" in event), {})
    return Answer(
        status,
        "".join(word for _, word in words),
        timings.get("prompt_n", 0),
        timings.get("cache_n", 0),
        words[0][0] if words else (events[-1][0] if events else 0.0),
        headers.get("X-KVProxy-Outcome", ""),
        headers.get("X-KVProxy-Reason", ""),
    )


def _word(event: dict[str, Any]) -> str:
    return "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", []))
