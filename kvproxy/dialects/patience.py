"""What the client of a stream hears while we hold its request, and how it is told of a failure then: pure.

A request that waits for a slot, a save or a restore is silent, and clients give up on silence: after 60
seconds the impatient, after 300 most. So a stream that was silent for long is begun by us, with a status of
200 and *pulses* that mean nothing, until the server speaks. The price: the server's own status and headers
can no longer be told, so what fails from then on is told inside the stream, in the caller's words. Hence
never sooner than needed, and never for an answer that is no stream, where nothing can be sent.

What a pulse may be differs. Continue takes a line that begins `: ping` for the end of the stream. Codex and
Claude Code count parsed events, and a comment is none. The official OpenAI libraries refuse any event of a
response before `response.created`, and for them a comment is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from kvproxy.dialects.endpoints import Dialect
from kvproxy.dialects.errors import kind_of

STREAM_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

COMMENT = b":\n\n"
"""What llama-server sends itself."""

SDK_HEADER = "x-stainless-lang"
"""Sent by the official libraries of OpenAI and Anthropic alone."""


@dataclass(frozen=True, slots=True)
class Failure:
    """`code` is ours or the server's own, empty where there is none; `kind` the server's type."""

    status: int
    message: str
    code: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Manner:
    """How one kind of stream is kept waiting. `failure` makes the event that ends one."""

    pulse: bytes
    failure: Callable[[Failure], bytes]


@dataclass(frozen=True, slots=True)
class Patience:
    """When pulses come: the first after `after_seconds` of silence (0: never), the others at intervals."""

    after_seconds: float
    every_seconds: float


def manner_of(label: str, headers: Mapping[str, str]) -> Manner | None:
    """For a stream of the endpoint `label`; None where nothing is known that would do no harm.

    A page of another origin may read an answer only if the server's headers say so, and those nobody knows
    yet.
    """
    if _is_cross_origin(headers):
        return None
    if label == "responses" and SDK_HEADER in headers:
        return _RESPONSES_OF_SDK
    return _MANNERS.get(label)


def _is_cross_origin(headers: Mapping[str, str]) -> bool:
    origin = headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != headers.get("Host")


def failure_of_answer(status: int, body: bytes) -> Failure:
    """An answer that is no stream, to be told inside one: the server's own words where it gave them."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, str):
        return Failure(status, error)
    if not isinstance(error, dict):
        return Failure(status, f"llama-server answered {status} and not with a stream")
    message, kind, code = (error.get(name) for name in ("message", "type", "code"))
    return Failure(
        status,
        message if isinstance(message, str) else f"llama-server answered {status}",
        code if isinstance(code, str) else "",
        kind if isinstance(kind, str) else "",
    )


def _event(name: str | None, data: Mapping[str, Any]) -> bytes:
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, orjson.dumps(data))


def _openai(failure: Failure) -> bytes:
    """As llama-server ends a stream that fails; the libraries raise on it."""
    kind = failure.kind or kind_of(Dialect.OPENAI, failure.status)
    error = {"message": failure.message, "type": kind, "code": failure.code or failure.status}
    return _event(None, {"error": error})


def _anthropic(failure: Failure) -> bytes:
    error = {"type": kind_of(Dialect.ANTHROPIC, failure.status), "message": failure.message}
    return _event("error", {"type": "error", "error": error})


def _responses(failure: Failure) -> bytes:
    code = failure.code or failure.kind or kind_of(Dialect.OPENAI, failure.status)
    response = {
        "id": "resp_failed",
        "object": "response",
        "status": "failed",
        "error": {"code": code, "message": failure.message},
        "output": [],
    }
    data = {"type": "response.failed", "sequence_number": 0, "response": response}
    return _event("response.failed", data)


_COMMENTED = Manner(COMMENT, _openai)
_MESSAGES = Manner(_event("ping", {"type": "ping"}), _anthropic)
_RESPONSES = Manner(_event("keepalive", {"type": "keepalive"}), _responses)
_RESPONSES_OF_SDK = Manner(COMMENT, _responses)

_MANNERS: Mapping[str, Manner] = {
    "chat/completions": _COMMENTED,
    "completions": _COMMENTED,
    "completion": _COMMENTED,
    "infill": _COMMENTED,
    "messages": _MESSAGES,
    "responses": _RESPONSES,
}
