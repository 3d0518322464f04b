"""Answers in the shapes of each API: pure functions from events to JSON and stream text."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.engine import Final, PromptProgress, Token
from tests.fakes.probabilities import Probabilities

BUILD = "b11434-fake"
Json = dict[str, Any]

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def error(code: int, message: str, **more: Any) -> Json:
    return {"error": {"code": code, "message": message, "type": _ERROR_TYPES[code], **more}}


def too_long(n_prompt: int, n_ctx: int) -> Json:
    message = (
        f"request ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it"
    )
    reply = error(400, message, n_prompt_tokens=n_prompt, n_ctx=n_ctx)
    reply["error"]["type"] = "exceed_context_size_error"
    return reply


def timings(final: Final) -> Json:
    n_prompt, n_decoded = final.n_prompt - final.n_cached, final.n_decoded
    return {
        "cache_n": final.n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": 1.0,
        "prompt_per_token_ms": 1.0 / max(n_prompt, 1),
        "prompt_per_second": n_prompt * 1000.0,
        "predicted_n": n_decoded,
        "predicted_ms": 1.0,
        "predicted_per_token_ms": 1.0 / max(n_decoded, 1),
        "predicted_per_second": n_decoded * 1000.0,
    }


def usage(final: Final) -> Json:
    return {
        "completion_tokens": final.n_decoded,
        "prompt_tokens": final.n_prompt,
        "total_tokens": final.n_prompt + final.n_decoded,
        "prompt_tokens_details": {"cached_tokens": final.n_cached},
    }


def sse(data: Json, event: str | None = None) -> bytes:
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


@dataclass(slots=True)
class Answer:
    """One answer in the making. Subclasses are the dialects; this one is the native /completion."""

    model: str
    n_prompt: int
    n_cached: int = 0
    include_usage: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(16)}")
    begun: bool = False
    probabilities: Probabilities = field(default_factory=Probabilities)
    """of the native answer"""
    calls_tools: bool = False
    """a chat answer says that it ended in a tool call"""
    end: bytes = b""

    def progress(self, event: PromptProgress) -> bytes:
        detail = {"total": event.total, "cache": event.cache, "processed": event.processed, "time_ms": 0}
        return sse(
            {
                "index": event.index,
                "content": "",
                "tokens": [0],
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": 0,
                "tokens_evaluated": event.total,
                "prompt_progress": detail,
            }
        )

    def token(self, event: Token) -> bytes:
        return sse(
            {
                "index": event.index,
                "content": text(event.text),
                "tokens": [],
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": event.n_decoded,
                "tokens_evaluated": self.n_prompt,
            }
        )

    def final(self, event: Final) -> bytes:
        return sse(self._native(event, ""))

    def whole(self, finals: list[Final]) -> Any:
        answers = [self._native(final, text(final.text)) for final in finals]
        return answers[0] if len(answers) == 1 else answers

    def _native(self, final: Final, content: str) -> Json:
        said = self.probabilities.of(final.text)
        return {
            **({"completion_probabilities": said} if said else {}),
            "index": final.index,
            "content": content,
            "tokens": [],
            "id_slot": final.id_slot,
            "stop": True,
            "model": self.model,
            "tokens_predicted": final.n_decoded,
            "tokens_evaluated": final.n_prompt,
            "generation_settings": {},
            "truncated": final.truncated,
            "stop_type": "limit" if final.stopped_by_limit else "eos",
            "stopping_word": "",
            "tokens_cached": final.n_prompt + final.n_decoded - 1,
            "timings": timings(final),
        }


@dataclass(slots=True)
class TextAnswer(Answer):
    """/v1/completions"""

    end: bytes = b"data: [DONE]\n\n"

    def token(self, event: Token) -> bytes:
        return sse(self._frame([self._choice(event.index, text(event.text), None)]))

    def final(self, event: Final) -> bytes:
        frame = self._frame([self._choice(event.index, "", _finish(event))])
        return sse({**frame, "usage": usage(event), "timings": timings(event)})

    def whole(self, finals: list[Final]) -> Json:
        frame = self._frame([self._choice(f.index, text(f.text), _finish(f)) for f in finals])
        return {**frame, "usage": usage(finals[0]), "timings": timings(finals[0])}

    def _choice(self, index: int, content: str, reason: str | None) -> Json:
        return {"text": content, "index": index, "logprobs": None, "finish_reason": reason}

    def _frame(self, choices: list[Json]) -> Json:
        return _openai_frame(self, choices, "text_completion")


@dataclass(slots=True)
class ChatAnswer(Answer):
    """/v1/chat/completions"""

    end: bytes = b"data: [DONE]\n\n"

    def progress(self, event: PromptProgress) -> bytes:
        detail = {"total": event.total, "cache": event.cache, "processed": event.processed, "time_ms": 0}
        frame = self._chunk(event.index, {"role": "assistant", "content": None})
        return sse({**frame, "prompt_progress": detail})

    def token(self, event: Token) -> bytes:
        chunk = sse(self._chunk(event.index, {"content": text(event.text)}))
        if self.begun:
            return chunk
        self.begun = True
        return sse(self._chunk(event.index, {"role": "assistant", "content": None})) + chunk

    def final(self, event: Final) -> bytes:
        last = self._chunk(event.index, {}, self._reason(event))
        if not self.include_usage:
            return sse({**last, "timings": timings(event)})
        frame = _openai_frame(self, [], "chat.completion.chunk")
        return sse(last) + sse({**frame, "usage": usage(event), "timings": timings(event)})

    def whole(self, finals: list[Final]) -> Json:
        choices = [
            {
                "finish_reason": self._reason(final),
                "index": final.index,
                "message": {"role": "assistant", "content": text(final.text)},
            }
            for final in finals
        ]
        frame = _openai_frame(self, choices, "chat.completion")
        return {**frame, "usage": usage(finals[0]), "timings": timings(finals[0])}

    def _reason(self, final: Final) -> str:
        return "tool_calls" if self.calls_tools else _finish(final)

    def _chunk(self, index: int, delta: Json, reason: str | None = None) -> Json:
        choice = {"finish_reason": reason, "index": index, "delta": delta}
        return _openai_frame(self, [choice], "chat.completion.chunk")


@dataclass(slots=True)
class ResponsesAnswer(Answer):
    """/v1/responses: a stream tells timings at its end, a whole answer has usage only."""

    so_far: bytes = b""

    def progress(self, event: PromptProgress) -> bytes:
        return b""

    def token(self, event: Token) -> bytes:
        head = b"" if self.begun else self._head()
        self.begun = True
        self.so_far += event.text
        delta = {"item_id": f"msg_{self.id}", "delta": text(event.text)}
        return head + self._event("response.output_text.delta", **delta)

    def final(self, event: Final) -> bytes:
        item = self._item("completed")
        return (
            self._event("response.output_text.done", item_id=item["id"], text=text(self.so_far))
            + self._event("response.content_part.done", item_id=item["id"], part=item["content"][0])
            + self._event("response.output_item.done", item=item)
            + self._event("response.completed", response=self._response(event), timings=timings(event))
        )

    def whole(self, finals: list[Final]) -> Json:
        self.so_far = finals[0].text
        return self._response(finals[0])

    def _head(self) -> bytes:
        opening = {"id": f"resp_{self.id}", "object": "response", "status": "in_progress"}
        item = {**self._item("in_progress"), "content": []}
        part = {"type": "output_text", "text": ""}
        return (
            self._event("response.created", response=opening)
            + self._event("response.in_progress", response=opening)
            + self._event("response.output_item.added", item=item)
            + self._event("response.content_part.added", item_id=item["id"], part=part)
        )

    def _event(self, kind: str, **more: Any) -> bytes:
        return sse({"type": kind, **more}, kind)

    def _item(self, status: str) -> Json:
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text(self.so_far)}
        return {
            "content": [part],
            "id": f"msg_{self.id}",
            "role": "assistant",
            "status": status,
            "type": "message",
        }

    def _response(self, final: Final) -> Json:
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "completed",
            "model": self.model,
            "output": [self._item("completed")],
            "usage": {
                "input_tokens": final.n_prompt,
                "output_tokens": final.n_decoded,
                "total_tokens": final.n_prompt + final.n_decoded,
                "input_tokens_details": {"cached_tokens": final.n_cached},
            },
        }


@dataclass(slots=True)
class MessagesAnswer(Answer):
    """/v1/messages: no timings; a stream tells what was reused in its first event."""

    def progress(self, event: PromptProgress) -> bytes:
        return b""

    def token(self, event: Token) -> bytes:
        head = b"" if self.begun else self._head()
        self.begun = True
        delta = {"type": "text_delta", "text": text(event.text)}
        return head + self._event("content_block_delta", index=0, delta=delta)

    def final(self, event: Final) -> bytes:
        stop = {"stop_reason": _stop_reason(event), "stop_sequence": None}
        return (
            self._event("content_block_stop", index=0)
            + self._event("message_delta", delta=stop, usage={"output_tokens": event.n_decoded})
            + self._event("message_stop")
        )

    def whole(self, finals: list[Final]) -> Json:
        content = [{"type": "text", "text": text(finals[0].text)}]
        return self._message(content, _stop_reason(finals[0]), finals[0].n_decoded)

    def _head(self) -> bytes:
        block = {"type": "text", "text": ""}
        return self._event("message_start", message=self._message([], None, 0)) + self._event(
            "content_block_start", index=0, content_block=block
        )

    def _event(self, kind: str, **more: Any) -> bytes:
        return sse({"type": kind, **more}, kind)

    def _message(self, content: list[Json], reason: str | None, n_decoded: int) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.model,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": {
                "cache_read_input_tokens": self.n_cached,
                "input_tokens": self.n_prompt - self.n_cached,
                "output_tokens": n_decoded,
            },
        }


def _openai_frame(answer: Answer, choices: list[Json], kind: str) -> Json:
    return {
        "choices": choices,
        "created": int(time.time()),
        "id": answer.id,
        "model": answer.model,
        "system_fingerprint": BUILD,
        "object": kind,
    }


def _finish(final: Final) -> str:
    return "length" if final.stopped_by_limit else "stop"


def _stop_reason(final: Final) -> str:
    return "max_tokens" if final.stopped_by_limit else "end_turn"
