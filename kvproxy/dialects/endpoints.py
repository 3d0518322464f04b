"""What a request may do on the server: how far its work can reach into the slots.

Read from llama-server's own route list (`server.cpp`) and handlers (`server-context.cpp`). The server cuts a
target at `#` and then at `?`, percent-decodes the path once before it matches, and matches exactly; so do we.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any


class Dialect(StrEnum):
    """Whose error format the caller understands."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Reach(StrEnum):
    """Which slots a request may run in."""

    NONE = "none"
    """No inference."""
    PINNED = "pinned"
    """One slot, the one named by `id_slot`."""
    FLOATING = "floating"
    """One slot of the server's choice."""
    EXCLUSIVE = "exclusive"
    """Possibly several slots at once, or, for management, what they hold without running in them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`label` is from a fixed list and fit for a metric."""

    label: str
    dialect: Dialect
    reach: Reach
    changes_identity: bool = False
    """Whether the server may compute something else afterwards."""
    has_turns: bool = False
    """Whether its requests are a conversation's though the server chooses the slot."""

    @property
    def is_management(self) -> bool:
        """Whether it may change what slots hold without a trace in what they ran."""
        return self.label == "management"


def _openai(label: str, reach: Reach) -> Endpoint:
    return Endpoint(label, Dialect.OPENAI, reach)


_CHAT = _openai("chat/completions", Reach.PINNED)
_OPENAI_COMPLETIONS = _openai("completions", Reach.PINNED)
_COMPLETION = _openai("completion", Reach.PINNED)
_RESPONSES = _openai("responses", Reach.PINNED)
_INFILL = _openai("infill", Reach.PINNED)
_MESSAGES = Endpoint("messages", Dialect.ANTHROPIC, Reach.FLOATING, has_turns=True)
_EMBEDDINGS = _openai("embeddings", Reach.FLOATING)
_TRANSCRIPTIONS = _openai("audio/transcriptions", Reach.FLOATING)
_UNKNOWN_POST = _openai("other", Reach.FLOATING)
_RERANK = _openai("rerank", Reach.EXCLUSIVE)
_SYSTEMONE = _openai("systemone", Reach.EXCLUSIVE)
_PREDICT = _openai("predict", Reach.EXCLUSIVE)
_TOKENS = _openai("tokens", Reach.NONE)
_MESSAGES_TOKENS = Endpoint("tokens", Dialect.ANTHROPIC, Reach.NONE)
_CONTROL = _openai("control", Reach.NONE)
_MANAGEMENT = _openai("management", Reach.EXCLUSIVE)
_ADAPTERS = Endpoint("management", Dialect.OPENAI, Reach.EXCLUSIVE, changes_identity=True)
_MODELS = _openai("models", Reach.NONE)
_STATE = _openai("state", Reach.NONE)
_OTHER = _openai("other", Reach.NONE)

_POST: Mapping[str, Endpoint] = {
    "/v1/chat/completions": _CHAT,
    "/chat/completions": _CHAT,
    "/v1/completions": _OPENAI_COMPLETIONS,
    "/completion": _COMPLETION,
    "/completions": _COMPLETION,
    "/v1/responses": _RESPONSES,
    "/responses": _RESPONSES,
    "/infill": _INFILL,
    "/v1/messages": _MESSAGES,
    "/embedding": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    "/v1/embeddings": _EMBEDDINGS,
    "/v1/audio/transcriptions": _TRANSCRIPTIONS,
    "/audio/transcriptions": _TRANSCRIPTIONS,
    "/rerank": _RERANK,
    "/reranking": _RERANK,
    "/v1/rerank": _RERANK,
    "/v1/reranking": _RERANK,
    "/v1/systemone": _SYSTEMONE,
    "/predict": _PREDICT,
    "/tokenize": _TOKENS,
    "/detokenize": _TOKENS,
    "/apply-template": _TOKENS,
    "/chat/completions/input_tokens": _TOKENS,
    "/v1/chat/completions/input_tokens": _TOKENS,
    "/responses/input_tokens": _TOKENS,
    "/v1/responses/input_tokens": _TOKENS,
    "/v1/messages/count_tokens": _MESSAGES_TOKENS,
    "/v1/chat/completions/control": _CONTROL,
    "/v1/streams/lookup": _CONTROL,
    "/props": _MANAGEMENT,
    "/lora-adapters": _ADAPTERS,
    "/models": _MANAGEMENT,
    "/models/load": _MANAGEMENT,
    "/models/unload": _MANAGEMENT,
    "/cors-proxy": _MANAGEMENT,
    "/tools": _MANAGEMENT,
}

_GET: Mapping[str, Endpoint] = {
    "/models": _MODELS,
    "/v1/models": _MODELS,
    "/health": _STATE,
    "/v1/health": _STATE,
    "/props": _STATE,
    "/slots": _STATE,
    "/metrics": _STATE,
}

_WITHOUT_INFERENCE = frozenset({"GET", "HEAD", "OPTIONS", "DELETE", "TRACE"})

LABELS = tuple(sorted({e.label for e in (*_POST.values(), *_GET.values(), _UNKNOWN_POST)}))
"""All labels there are."""


@lru_cache(maxsize=512)
def classify(method: str, path: str) -> Endpoint:
    """`path` as it stands in the request line; a query is ignored."""
    route = decoded(path.partition("#")[0].partition("?")[0])
    if method in _WITHOUT_INFERENCE:
        return _GET.get(route, _OTHER)
    if route.startswith("/slots/"):
        return _MANAGEMENT
    return _POST.get(route, _UNKNOWN_POST)


_ESCAPE = re.compile(rb"%(?:u([0-9a-fA-F]{4})|([0-9a-fA-F]{2}))")


def decoded(path: str) -> str:
    """`path` percent-decoded once, as llama-server does it: `%uXXXX` is a character there, too."""
    raw = path.encode("utf-8", "surrogateescape")
    return _ESCAPE.sub(_meant, raw).decode("utf-8", "replace") if b"%" in raw else path


def _meant(escape: re.Match[bytes]) -> bytes:
    if escape[1] is not None:
        return chr(int(escape[1], 16)).encode("utf-8", "surrogatepass")
    return bytes.fromhex(escape[2].decode())


def refine(
    endpoint: Endpoint, document: Mapping[str, Any] | None, *, may_hide_several: bool = False
) -> Reach:
    """How far this one request reaches, given its body as JSON (None: we cannot read it, the server may, and
    `may_hide_several` prompts or answers in it)."""
    reach = endpoint.reach
    if reach in (Reach.NONE, Reach.EXCLUSIVE) or endpoint is _TRANSCRIPTIONS:
        return reach  # a transcription is a form, and its fields are strings: `n` is refused there
    if document is None:
        return Reach.EXCLUSIVE if may_hide_several else Reach.FLOATING
    return Reach.EXCLUSIVE if _wants_several(endpoint, document) else reach


_ANSWER_FIELDS = ("n", "n_cmpl")
_PROMPT_FIELDS: Mapping[str, tuple[str, ...]] = {
    _COMPLETION.label: ("prompt",),
    _OPENAI_COMPLETIONS.label: ("prompt",),
    _EMBEDDINGS.label: ("input", "content"),
    _UNKNOWN_POST.label: ("prompt", "input", "content", "instances"),
}
"""Where an endpoint takes several prompts, by its label. The `input` of a response is a list too, but one
prompt."""


def _wants_several(endpoint: Endpoint, document: Mapping[str, Any]) -> bool:
    for field in _ANSWER_FIELDS:
        if field in document and _exceeds_one(document[field]):
            return True
    fields = _PROMPT_FIELDS.get(endpoint.label, ())
    return any(_is_several_prompts(document.get(field)) for field in fields) if fields else False


def _exceeds_one(value: object) -> bool:
    """The server takes `2.0` for 2. What is no number it refuses, without using a slot."""
    return isinstance(value, int | float) and value > 1


def _is_several_prompts(value: object) -> bool:
    """A list with any token id in it is one prompt; other lists hold one prompt per entry."""
    if not isinstance(value, list) or len(value) < 2:
        return False
    return not any(isinstance(entry, int) and not isinstance(entry, bool) for entry in value)
