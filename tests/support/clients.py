"""Conversations as clients of different kinds hold them, and the side calls beside them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.fakes import requests
from tests.fakes.tokens import detokenize, tokenize

OPENINGS = ("", "You help in the harbour office. " * 12, "You are an agent in a terminal. " * 20)
"""System prompts that several conversations have in common."""

LEAST_RAW = 55
"""Words of a raw prompt below which it is nobody's."""

_CANARY = re.compile(r"CANARY-(\w{4})")
Body = dict[str, Any]


class Kind(StrEnum):
    """By what a client's conversation is to be known."""

    NAMED = "named"
    """an id of its own"""
    STATIC = "static"
    """one id for all of the installation's"""
    NAMELESS = "nameless"
    """its content"""
    RAW = "raw"
    """its content, which is one growing prompt"""
    LETTERS = "letters"
    """an id of its own, over `/v1/messages`"""
    NAMELESS_LETTERS = "nameless letters"


_PATHS = {
    Kind.RAW: "/completion",
    Kind.LETTERS: "/v1/messages",
    Kind.NAMELESS_LETTERS: "/v1/messages",
}
_CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Request:
    """`name` is the canary by which its words, and what it left in a slot, are told from anybody else's."""

    name: str
    path: str
    headers: dict[str, str]
    body: Body

    @property
    def prompts(self) -> list[list[int]]:
        """What the server is to compute."""
        if self.path == "/completion":
            return requests.plain_prompts(self.body)
        if self.path == "/infill":
            return requests.infill_prompts(self.body)
        render = requests.anthropic_text if self.path == "/v1/messages" else requests.chat_text
        return [tokenize(render(self.body))]


@dataclass(slots=True)
class Chat:
    """One conversation. `said` alternates between what was asked and what was answered."""

    kind: Kind
    name: str
    opening: str
    client: str
    """the id, where the kind has one"""
    said: list[str] = field(default_factory=list)
    past: list[str] | None = None
    """what had been said before the newest edit"""

    def ask(self, words: int, *, stream: bool) -> Request:
        """The next turn; what was asked last again if it was not answered."""
        if len(self.said) % 2 == 0:
            words += LEAST_RAW if self.kind is Kind.RAW and not self.said else 0
            self.said.append(f"CANARY-{self.name} {len(self.said)}: {'tell me more of it, ' * words}")
        return self._request(stream=stream)

    def regenerate(self, *, stream: bool) -> Request:
        del self.said[len(self.said) - 1 + len(self.said) % 2 :]
        return self._request(stream=stream)

    def edit(self, words: int, *, stream: bool) -> Request:
        """Another question in place of the last that was answered. The first stays: another first question
        is another conversation."""
        self.past = list(self.said[: len(self.said) // 2 * 2])
        del self.said[len(self.past) - 2 :]
        self.said.append(f"CANARY-{self.name} edited: {'or rather that, ' * words}")
        return self._request(stream=stream)

    def go_back(self, words: int, *, stream: bool) -> Request:
        """The conversation goes on from what an edit had replaced."""
        self.said, self.past = list(self.past or ()), list(self.said[: len(self.said) // 2 * 2])
        return self.ask(words, stream=stream)

    @property
    def may_edit(self) -> bool:
        return self.kind is not Kind.RAW and len(self.said) >= 4

    def heard(self, text: str) -> None:
        self.said.append(text)

    @property
    def headers(self) -> dict[str, str]:
        if self.kind is Kind.STATIC:
            return {"X-Session-Id": "everything"}
        return {"X-Session-Id": self.client} if self.kind in (Kind.NAMED, Kind.LETTERS) else {}

    def _request(self, *, stream: bool) -> Request:
        path = _PATHS.get(self.kind, _CHAT)
        return Request(self.name, path, self.headers, {**self._said(), "max_tokens": 20, "stream": stream})

    def _said(self) -> Body:
        if self.kind is Kind.RAW:
            return {"prompt": "\n".join(self.said), "n_predict": 20}
        roles = ("user", "assistant")
        turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(self.said)]
        if not self.opening:
            return {"messages": turns}
        if self.kind in (Kind.LETTERS, Kind.NAMELESS_LETTERS):
            return {"system": self.opening, "messages": turns}
        return {"messages": [{"role": "system", "content": self.opening}, *turns]}


class Side(StrEnum):
    """Side calls, by what tells that they are."""

    TASK = "task"
    """Open WebUI's wording"""
    TITLE = "title"
    """OpenCode's system prompt"""
    HEADER = "header"
    """our own header"""
    INFILL = "infill"
    """an editor that names slot 0"""
    LETTER = "letter"
    """a title over `/v1/messages`"""

    def beside(self, chat: Chat, name: str) -> Request:
        """The call, under the conversation's id if that has one."""
        told = f"<chat_history>\n{' / '.join(chat.said)}\n</chat_history> CANARY-{name} "
        if self is Side.INFILL:
            body = {"input_prefix": told, "input_suffix": "", "id_slot": 0, "n_predict": 12}
            return Request(name, "/infill", chat.headers, body)
        if self is Side.TITLE:
            system = "You are a title generator. You output ONLY a thread title. Nothing else."
            turns = [{"role": "system", "content": system}, {"role": "user", "content": told}]
            return Request(name, _CHAT, chat.headers, {"messages": turns, "max_tokens": 12})
        path = "/v1/messages" if self is Side.LETTER else _CHAT
        more = {"X-KVProxy-Purpose": "auxiliary"} if self in (Side.HEADER, Side.LETTER) else {}
        text = f"### Task:\nGenerate a title.\n### Output:\nJSON\n{told}" if self is Side.TASK else told
        turns = [{"role": "user", "content": text}]
        return Request(name, path, {**chat.headers, **more}, {"messages": turns, "max_tokens": 12})


def names_in(tokens: list[int]) -> set[str]:
    """Whose words are among these tokens."""
    return set(_CANARY.findall(detokenize(tokens)))


def words_of(raw: bytes, *, is_stream: bool) -> str:
    """What the model said, in any dialect; whole and as much of a stream as came."""
    if not is_stream:
        return _piece(json.loads(raw))
    data = (line[6:] for line in raw.decode().splitlines() if line.startswith("data: {"))
    return "".join(_piece(json.loads(event)) for event in data)


def _piece(said: Body) -> str:
    if "choices" in said:
        choice = (said["choices"] or [{}])[0]
        return str(choice.get("message", choice.get("delta", {})).get("content") or "")
    if "delta" in said:
        return str(said["delta"].get("text", ""))
    content = said.get("content", "")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
