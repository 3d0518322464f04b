"""The HTTP face: routes, who may call them, streams and their ends."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tests.fakes import replies, requests
from tests.fakes.actions import SlotActions
from tests.fakes.engine import (
    Action,
    Completion,
    Engine,
    Event,
    Final,
    PromptProgress,
    Task,
    Token,
    TooLong,
)
from tests.fakes.faults import Failure, Faults
from tests.fakes.requests import BadRequest, Json
from tests.fakes.tokens import detokenize, tokenize
from tests.fakes.views import Setup, models_view, props_view, slot_view
from tests.fakes.wire import Wire, is_gone, reset

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PUBLIC = {"/health", "/v1/health", "/"}
BYPASS_SLEEP = {"/health", "/v1/health", "/props", "/models", "/v1/models", "/metrics"}
MAX_BODY = 100 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it arrived."""

    method: str
    path: str
    action: str | None
    slot: int | None
    filename: str | None
    body: bytes
    headers: dict[str, str]
    at: float
    """seconds on the loop's clock"""


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


def json_response(data: Any, status: int = 200) -> web.Response:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return web.Response(text=text, status=status, content_type="application/json", charset="utf-8")


def refusal(code: int, message: str) -> web.Response:
    return json_response(replies.error(code, message), code)


class Api:
    """The routes of one life of the server."""

    def __init__(
        self,
        setup: Setup,
        faults: Faults,
        engine: Engine,
        wire: Wire,
        actions: SlotActions | None,
        calls: list[Call],
        ended: asyncio.Event,
    ) -> None:
        self.setup = setup
        self.faults = faults
        self.engine = engine
        self.wire = wire
        self.actions = actions
        self.calls = calls
        self.ended = ended
        self.sleeping = False
        self._late: set[asyncio.Task[None]] = set()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._gatekeeper], client_max_size=MAX_BODY)
        app.on_response_prepare.append(self.wire.dress)
        for path in ("/health", "/v1/health"):
            app.router.add_get(path, self.health)
        for path in ("/models", "/v1/models"):
            app.router.add_get(path, self.models)
        app.router.add_get("/props", self.props)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/lora-adapters", self.lora_adapters)
        app.router.add_get("/slots", self.get_slots)
        app.router.add_post("/slots/{id_slot}", self.slot_action)
        for path in COMPLETIONS:
            app.router.add_post(path, self.completion)
        for path in ("/embedding", "/embeddings", "/v1/embeddings"):
            app.router.add_post(path, self.embeddings)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_post("/apply-template", self.apply_template)
        app.router.add_post("/v1/messages/count_tokens", self.count_tokens)
        return app

    @web.middleware
    async def _gatekeeper(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.wire.arrived(request)
        try:
            body = await request.read()
            self.calls.append(_call(request, body))
            return await self._admit(request, handler)
        finally:
            self.wire.left(request)

    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        while self.faults.frozen and not await self._ends_within(0.005):
            continue
        if self.faults.loading:
            return refusal(503, "Loading model")
        if request.method == "OPTIONS":
            return web.Response(content_type="text/html")
        if request.path not in PUBLIC and not self._has_key(request):
            return refusal(401, "Invalid API Key")
        if request.path not in BYPASS_SLEEP:
            self.sleeping = False
        try:
            return await handler(request)
        except BadRequest as problem:
            return refusal(400, str(problem))
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            return refusal(404, "File Not Found")

    async def _ends_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.ended.wait()
        except TimeoutError:
            return False
        return True

    def _has_key(self, request: web.Request) -> bool:
        if not self.setup.api_key:
            return True
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return (given or request.headers.get("X-Api-Key", "")) == self.setup.api_key

    async def health(self, request: web.Request) -> web.StreamResponse:
        return json_response({"status": "ok"})

    async def models(self, request: web.Request) -> web.StreamResponse:
        return json_response(models_view(self.setup))

    async def props(self, request: web.Request) -> web.StreamResponse:
        return json_response(props_view(self.setup, len(self.engine.bank.slots), sleeping=self.sleeping))

    async def lora_adapters(self, request: web.Request) -> web.StreamResponse:
        return json_response([])

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        if not self.setup.endpoint_metrics:
            return refusal(501, "This server does not support metrics endpoint. Start it with `--metrics`")
        busy = sum(slot.is_processing for slot in self.engine.bank.slots)
        values = {
            "prompt_tokens_total": self.engine.prompt_tokens_total,
            "prompt_tokens_cached_total": self.engine.cached_tokens_total,
            "tokens_predicted_total": self.engine.predicted_tokens_total,
            "requests_processing": busy,
            "requests_deferred": len(self.engine.deferred),
        }
        lines = "".join(f"llamacpp:{name} {value}\n" for name, value in values.items())
        return web.Response(text=lines, content_type="text/plain")

    async def get_slots(self, request: web.Request) -> web.StreamResponse:
        if not self.setup.endpoint_slots:
            return refusal(501, "This server does not support slots endpoint. Start it with `--slots`")
        await self.engine.settled()
        self.engine.note_result()
        slots = self.engine.bank.slots
        if request.query.get("fail_on_no_slot") and all(slot.is_processing for slot in slots):
            return refusal(503, "no slot available")
        return json_response([slot_view(slot) for slot in slots])

    async def slot_action(self, request: web.Request) -> web.StreamResponse:
        if self.actions is None:
            return refusal(501, "This server does not support slots action. Start it with `--slot-save-path`")
        number = re.match(r"\s*[+-]?\d+", request.match_info["id_slot"])
        if number is None:
            return refusal(400, "Invalid slot ID")
        kind = request.query.get("action", "")
        if kind not in ("save", "restore", "erase"):
            return refusal(400, "Invalid action")
        filename = ""
        if kind != "erase":
            filename = requests.require(requests.parse_json(await request.read()), "filename")
            if not requests.valid_filename(filename):
                return refusal(400, "Invalid filename")
        return await self._act(request, self.actions, kind, int(number.group()), filename)

    async def _act(
        self, request: web.Request, actions: SlotActions, kind: str, id_slot: int, filename: str
    ) -> web.StreamResponse:
        failure = self.faults.take(kind)
        if failure in (Failure.ERROR, Failure.HANG, Failure.CLOSE):
            return await self._fail(request, failure)
        act = {"save": actions.save, "restore": actions.restore, "erase": actions.erase}[kind]
        work = Action(id_slot, lambda slot: act(slot, id_slot, filename, failure))
        results: asyncio.Queue[Event] = asyncio.Queue()
        if self.faults.late_actions:
            self._queue_late(work, results)
            task = None
        else:
            task = self.engine.submit(work, results)
        reply = await self._next(request, results, [task] if task else [], keep=task is None)
        if not isinstance(reply, dict):
            return web.Response()
        if failure is Failure.LOST_ANSWER:
            return await self._fail(request, Failure.CLOSE)
        if failure is Failure.GARBAGE:
            return web.Response(text='{"id_slot":', content_type="application/json")
        return json_response(reply["body"], reply["status"])

    def _queue_late(self, work: Action, results: asyncio.Queue[Event]) -> None:
        async def later() -> None:
            await asyncio.sleep(self.faults.late_actions)
            self.engine.submit(work, results)

        task = asyncio.get_running_loop().create_task(later())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def stop(self) -> None:
        for task in self._late:
            task.cancel()

    async def completion(self, request: web.Request) -> web.StreamResponse:
        failure = self.faults.take("completion")
        if failure is not None:
            return await self._fail(request, failure)
        dialect = COMPLETIONS[request.path]
        data = requests.parse_json(await request.read())
        works = requests.completions(
            data, dialect.prompts(data), pinnable=dialect.pinnable, slots=len(self.engine.bank.slots)
        )
        results: asyncio.Queue[Event] = asyncio.Queue()
        tasks = [self.engine.submit(work, results) for work in works]
        options = data.get("stream_options") or {}
        answer = dialect.answer(
            self.setup.alias, len(works[0].prompt), include_usage=bool(options.get("include_usage"))
        )
        n_answers = sum(1 + work.siblings for work in works)
        if not works[0].streams:
            return await self._whole(request, results, tasks, answer, n_answers)
        progress = data.get("return_progress") is True
        return await self._stream(request, results, tasks, answer, n_answers, progress=progress)

    async def _whole(
        self,
        request: web.Request,
        results: asyncio.Queue[Event],
        tasks: list[Task],
        answer: replies.Answer,
        n_answers: int,
    ) -> web.StreamResponse:
        finals: list[Final] = []
        while len(finals) < n_answers:
            event = await self._next(request, results, tasks)
            if event is None:
                return web.Response()
            if isinstance(event, TooLong):
                return json_response(replies.too_long(event.n_prompt, event.n_ctx), 400)
            if isinstance(event, Final):
                answer.n_cached = event.n_cached
                finals.append(event)
        return json_response(answer.whole(sorted(finals, key=lambda final: final.index)))

    async def _stream(
        self,
        request: web.Request,
        results: asyncio.Queue[Event],
        tasks: list[Task],
        answer: replies.Answer,
        n_answers: int,
        *,
        progress: bool,
    ) -> web.StreamResponse:
        """Status and headers go out when the slot starts on the prompt, before anything is computed."""
        keep = "X-Conversation-Id" in request.headers
        first = await self._next(request, results, tasks, keep=keep)
        if first is None:
            return web.Response()
        if isinstance(first, TooLong):
            return json_response(replies.too_long(first.n_prompt, first.n_ctx), 400)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        response.enable_chunked_encoding()
        await response.prepare(request)
        sent = finished = 0
        while finished < n_answers:
            event = await self._next(request, results, tasks, keep=keep)
            if event is None:
                return response
            if isinstance(event, PromptProgress):
                answer.n_cached = event.cache
            finished += isinstance(event, Final)
            chunk = _chunk(answer, event, progress=progress)
            if not chunk:
                continue
            if not await self._send(request, response, chunk) and not keep:
                self._cancel(tasks)
                return response
            sent += 1
            if sent == self.faults.cut_stream_after:
                self._cancel(tasks)
                await asyncio.sleep(0)
                if request.transport is not None:
                    request.transport.abort()
                return response
        await self._send(request, response, answer.end)
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, chunk: bytes) -> bool:
        if is_gone(request):
            return False
        try:
            await response.write(chunk)
        except ConnectionError:
            return False
        return True

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        if not self.setup.embeddings:
            return refusal(501, "This server does not support embeddings. Start it with `--embeddings`")
        data = requests.parse_json(await request.read())
        given: Any = data.get("input", data.get("content", ""))
        texts: list[str] = [given] if isinstance(given, str) else given
        results: asyncio.Queue[Event] = asyncio.Queue()
        works = [Completion(tokenize(text), generates=False, index=index) for index, text in enumerate(texts)]
        tasks = [self.engine.submit(work, results) for work in works]
        finals = 0
        while finals < len(works):
            event = await self._next(request, results, tasks)
            if event is None:
                return web.Response()
            if isinstance(event, TooLong):
                return json_response(replies.too_long(event.n_prompt, event.n_ctx), 400)
            finals += isinstance(event, Final)
        n_tokens = sum(len(work.prompt) for work in works)
        rows = [{"object": "embedding", "index": i, "embedding": [0.6, 0.8]} for i in range(len(works))]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return json_response({"object": "list", "data": rows, "model": self.setup.alias, "usage": usage})

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        data = requests.parse_json(await request.read())
        special = bool(data.get("add_special", False))
        parse = bool(data.get("parse_special", True))
        tokens = tokenize(data.get("content", ""), add_special=special, parse_special=parse)
        return json_response({"tokens": tokens})

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        data = requests.parse_json(await request.read())
        return json_response({"content": detokenize(data.get("tokens", []))})

    async def apply_template(self, request: web.Request) -> web.StreamResponse:
        data = requests.parse_json(await request.read())
        return json_response({"prompt": requests.chat_text(data)})

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        data = requests.parse_json(await request.read())
        return json_response({"input_tokens": len(tokenize(requests.anthropic_text(data)))})

    async def _fail(self, request: web.Request, failure: Failure) -> web.StreamResponse:
        if failure is Failure.ERROR:
            return refusal(500, "planned failure")
        if failure is Failure.HANG:
            await self.ended.wait()
        elif request.transport is not None:
            reset(request.transport)
        return web.Response()

    async def _next(
        self, request: web.Request, results: asyncio.Queue[Event], tasks: list[Task], *, keep: bool = False
    ) -> Event | None:
        """The next result; None once the client is found gone, and its tasks are cancelled then.

        Like the original this only looks at the client when no result, of any request, came for a while.
        """
        loop = asyncio.get_running_loop()
        waiting_since = loop.time()
        while True:
            quiet_until = max(self.engine.last_result, waiting_since) + self.faults.http_poll
            try:
                async with asyncio.timeout_at(quiet_until):
                    return await results.get()
            except TimeoutError:
                now = loop.time()
            if now - self.engine.last_result < self.faults.http_poll:
                continue
            waiting_since = now
            if not keep and is_gone(request):
                self._cancel(tasks)
                return None

    def _cancel(self, tasks: list[Task]) -> None:
        for task in tasks:
            self.engine.cancel(task)


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


def _call(request: web.Request, body: bytes) -> Call:
    number = re.fullmatch(r"/slots/(-?\d+)", request.path)
    return Call(
        method=request.method,
        path=request.path,
        action=request.query.get("action") if request.path.startswith("/slots/") else None,
        slot=int(number.group(1)) if number else None,
        filename=_filename(body) if number else None,
        body=body,
        headers=dict(request.headers),
        at=time.monotonic(),
    )


def _filename(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["filename"])
    except (ValueError, KeyError, TypeError):
        return None
