"""Requests that compute: all completion dialects and embeddings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.fakes import replies, requests
from tests.fakes.engine import (
    Broken,
    Completion,
    Engine,
    Event,
    Final,
    PromptProgress,
    Task,
    Token,
    TooLong,
)
from tests.fakes.faults import Faults
from tests.fakes.probabilities import Probabilities
from tests.fakes.requests import Json
from tests.fakes.runs import TAG
from tests.fakes.tokens import tokenize
from tests.fakes.views import Setup
from tests.fakes.waiting import Waiting, json_response, refusal
from tests.fakes.wire import is_gone


@dataclass(frozen=True, slots=True)
class Dialect:
    answer: type[replies.Answer]
    prompts: Callable[[Json], list[list[int]]]
    pinnable: bool = True


NATIVE = Dialect(replies.Answer, requests.plain_prompts)
CHAT = Dialect(replies.ChatAnswer, requests.rendered(requests.chat_text))
TEXT = Dialect(replies.TextAnswer, requests.plain_prompts)
RESPONSES = Dialect(replies.ResponsesAnswer, requests.rendered(requests.responses_text))
MESSAGES = Dialect(replies.MessagesAnswer, requests.rendered(requests.anthropic_text), pinnable=False)
INFILL = Dialect(replies.Answer, requests.infill_prompts)

COMPLETIONS = {
    "/completion": NATIVE,
    "/completions": NATIVE,
    "/v1/completions": TEXT,
    "/chat/completions": CHAT,
    "/v1/chat/completions": CHAT,
    "/responses": RESPONSES,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/infill": INFILL,
}


@dataclass(slots=True)
class Exchange:
    """One request on its way to its answer or answers."""

    request: web.Request
    results: asyncio.Queue[Event]
    tasks: list[Task]
    n_answers: int
    answer: replies.Answer
    progress: bool = False
    keep: bool = False
    """goes on when the client has left"""


@dataclass(slots=True)
class Inference:
    setup: Setup
    faults: Faults
    engine: Engine
    waiting: Waiting

    async def completion(self, request: web.Request) -> web.StreamResponse:
        failure = self.faults.take("completion")
        if failure is not None:
            return await self.waiting.fail(request, failure)
        dialect = COMPLETIONS[request.path]
        data = requests.parse_json(await request.read())
        n_slots = len(self.engine.bank.slots)
        pinnable = dialect.pinnable or self.setup.messages_pin
        works = requests.completions(data, dialect.prompts(data), pinnable=pinnable, slots=n_slots)
        exchange = self._begin(request, works, dialect.answer)
        exchange.answer.include_usage = bool((data.get("stream_options") or {}).get("include_usage"))
        exchange.answer.calls_tools = data.get("tool_choice") == "required"
        exchange.answer.probabilities = Probabilities(self.setup.weights, works[0].prompt, _n_probs(data))
        exchange.progress = data.get("return_progress") is True
        exchange.keep = works[0].streams and "X-Conversation-Id" in request.headers
        if works[0].streams:
            return await self._stream(exchange)
        finals = await self._finals(exchange)
        if isinstance(finals, web.Response):
            return finals
        return json_response(exchange.answer.whole(finals))

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        if not self.setup.embeddings:
            return refusal(501, "This server does not support embeddings. Start it with `--embeddings`")
        data = requests.parse_json(await request.read())
        given: Any = data.get("input", data.get("content", ""))
        texts: list[str] = [given] if isinstance(given, str) else given
        works = [Completion(tokenize(text), generates=False, index=index) for index, text in enumerate(texts)]
        finals = await self._finals(self._begin(request, works, replies.Answer))
        if isinstance(finals, web.Response):
            return finals
        n_tokens = sum(len(work.prompt) for work in works)
        rows = [{"object": "embedding", "index": i, "embedding": [0.6, 0.8]} for i in range(len(works))]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return json_response({"object": "list", "data": rows, "model": self.setup.alias, "usage": usage})

    def _begin(self, request: web.Request, works: list[Completion], answer: type[replies.Answer]) -> Exchange:
        results: asyncio.Queue[Event] = asyncio.Queue()
        for work in works:
            work.tag = request.headers.get(TAG, "")
        tasks = [self.engine.submit(work, results) for work in works]
        n_answers = sum(1 + work.siblings for work in works)
        return Exchange(request, results, tasks, n_answers, answer(self.setup.alias, len(works[0].prompt)))

    async def _next(self, exchange: Exchange) -> Event | None:
        return await self.waiting.next(exchange.request, exchange.results, exchange.tasks, keep=exchange.keep)

    async def _finals(self, exchange: Exchange) -> list[Final] | web.Response:
        finals: list[Final] = []
        while len(finals) < exchange.n_answers:
            event = await self._next(exchange)
            if event is None:
                return web.Response()
            if isinstance(event, TooLong):
                return json_response(replies.too_long(event.n_prompt, event.n_ctx), 400)
            if isinstance(event, Broken):
                return refusal(500, event.message)
            if isinstance(event, Final):
                exchange.answer.n_cached = event.n_cached
                finals.append(event)
        return sorted(finals, key=lambda final: final.index)

    async def _stream(self, exchange: Exchange) -> web.StreamResponse:
        """Status and headers go out when the slot starts on the prompt, before anything is computed."""
        first = await self._next(exchange)
        if first is None:
            return web.Response()
        if isinstance(first, TooLong):
            return json_response(replies.too_long(first.n_prompt, first.n_ctx), 400)
        head = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=head)
        response.enable_chunked_encoding()
        if not is_gone(exchange.request):
            await response.prepare(exchange.request)
        pinging = asyncio.get_running_loop().create_task(self._ping(exchange, response))
        try:
            await self._stream_body(exchange, response)
        finally:
            pinging.cancel()
        return response

    async def _ping(self, exchange: Exchange, response: web.StreamResponse) -> None:
        while self.faults.ping_every:
            await asyncio.sleep(self.faults.ping_every)
            await self._send(exchange, response, b":\n\n")

    async def _stream_body(self, exchange: Exchange, response: web.StreamResponse) -> None:
        sent = finished = 0
        while finished < exchange.n_answers:
            event = await self._next(exchange)
            if event is None:
                return
            if isinstance(event, PromptProgress):
                exchange.answer.n_cached = event.cache
            finished += isinstance(event, Final)
            if isinstance(event, Broken):
                error = json.dumps(replies.error(500, event.message))
                await self._send(exchange, response, f"data: {error}\n\n".encode())
                return
            chunk = _chunk(exchange.answer, event, progress=exchange.progress)
            if not chunk:
                continue
            if not await self._send(exchange, response, chunk) and not exchange.keep:
                self.waiting.cancel(exchange.tasks)
                return
            sent += 1
            if sent == self.faults.cut_stream_after:
                await self._cut(exchange)
                return
        await self._send(exchange, response, exchange.answer.end)
        await asyncio.sleep(self.faults.slow_end)

    async def _cut(self, exchange: Exchange) -> None:
        self.waiting.cancel(exchange.tasks)
        await asyncio.sleep(0)  # lets the last event reach the kernel
        if exchange.request.transport is not None:
            exchange.request.transport.abort()

    async def _send(self, exchange: Exchange, response: web.StreamResponse, chunk: bytes) -> bool:
        if is_gone(exchange.request):
            return False
        try:
            await response.write(chunk)
        except ConnectionError:
            return False
        return True


def _n_probs(data: Json) -> int:
    wanted = data.get("n_probs", 0)
    return wanted if isinstance(wanted, int) else 0


def _chunk(answer: replies.Answer, event: Event, *, progress: bool) -> bytes:
    match event:
        case Token():
            return answer.token(event)
        case Final():
            return answer.final(event)
        case PromptProgress() if progress:
            return answer.progress(event)
        case _:
            return b""
