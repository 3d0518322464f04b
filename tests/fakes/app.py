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

from tests.fakes import requests
from tests.fakes.actions import SlotActions
from tests.fakes.engine import Engine
from tests.fakes.faults import Faults
from tests.fakes.inference import COMPLETIONS, Inference
from tests.fakes.requests import BadRequest
from tests.fakes.slot_routes import SlotRoutes
from tests.fakes.tokens import detokenize, tokenize
from tests.fakes.views import Setup, models_view, props_view
from tests.fakes.waiting import Waiting, json_response, refusal
from tests.fakes.wire import Wire

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PUBLIC = {"/health", "/v1/health", "/"}
BYPASS_SLEEP = {"/health", "/v1/health", "/props", "/models", "/v1/models", "/metrics"}
COUNTERS = {
    "/chat/completions/input_tokens": requests.chat_text,
    "/v1/chat/completions/input_tokens": requests.chat_text,
    "/responses/input_tokens": requests.responses_text,
    "/v1/responses/input_tokens": requests.responses_text,
}
MAX_BODY = 100 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it arrived."""

    method: str
    path: str
    target: str
    """path and query as they were sent"""
    action: str | None
    slot: int | None
    filename: str | None
    body: bytes
    headers: dict[str, str]
    at: float
    """monotonic seconds"""


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
        self.calls = calls
        self.sleeping = False
        self.adapters = [{"id": n, "path": path, "scale": 1.0} for n, path in enumerate(setup.adapters)]
        self.waiting = Waiting(engine, faults, ended)
        self.inference = Inference(setup, faults, engine, self.waiting)
        self.slot_routes = SlotRoutes(setup, faults, engine, self.waiting, actions)

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
        app.router.add_post("/lora-adapters", self.set_lora_adapters)
        app.router.add_get("/slots", self.slot_routes.get_slots)
        app.router.add_post("/slots/{id_slot}", self.slot_routes.slot_action)
        for path in COMPLETIONS:
            app.router.add_post(path, self.inference.completion)
        for path in ("/embedding", "/embeddings", "/v1/embeddings"):
            app.router.add_post(path, self.inference.embeddings)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_post("/apply-template", self.apply_template)
        app.router.add_post("/v1/messages/count_tokens", self.count_tokens)
        for path, render in COUNTERS.items():
            app.router.add_post(path, self._input_tokens(render))
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
        while self.faults.frozen and not await self.waiting.ends_within(0.005):
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
        return json_response(self.adapters)

    async def set_lora_adapters(self, request: web.Request) -> web.StreamResponse:
        """Those that are not named are switched off, as in the original."""
        wanted: Any = json.loads(await request.read())
        scales = {one["id"]: one["scale"] for one in wanted}
        self.adapters = [{**one, "scale": scales.get(one["id"], 0.0)} for one in self.adapters]
        return json_response({"success": True})

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

    def _input_tokens(self, render: Callable[[requests.Json], str]) -> Handler:
        async def count(request: web.Request) -> web.StreamResponse:
            data = requests.parse_json(await request.read())
            return json_response(
                {"input_tokens": len(tokenize(render(data))), "object": "response.input_tokens"}
            )

        return count


def _call(request: web.Request, body: bytes) -> Call:
    number = re.fullmatch(r"/slots/(-?\d+)", request.path)
    return Call(
        method=request.method,
        path=request.path,
        target=request.raw_path,
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
