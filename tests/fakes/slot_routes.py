"""GET /slots and POST /slots/{id}?action=…"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

from aiohttp import web

from tests.fakes import requests
from tests.fakes.actions import SlotActions
from tests.fakes.engine import Action, Engine, Event
from tests.fakes.faults import Failure, Faults
from tests.fakes.views import Setup, slot_view
from tests.fakes.waiting import Waiting, json_response, refusal


@dataclass(slots=True)
class SlotRoutes:
    setup: Setup
    faults: Faults
    engine: Engine
    waiting: Waiting
    actions: SlotActions | None
    late: set[asyncio.Task[None]] = field(default_factory=set)

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
        if self.setup.multimodal:
            return refusal(501, "This feature is not supported by multimodal")
        return await self._act(request, self.actions, kind, int(number.group()), filename)

    async def _act(
        self, request: web.Request, actions: SlotActions, kind: str, id_slot: int, filename: str
    ) -> web.StreamResponse:
        failure = self.faults.take(kind)
        if failure in (Failure.ERROR, Failure.HANG, Failure.CLOSE):
            return await self.waiting.fail(request, failure)
        act = {"save": actions.save, "restore": actions.restore, "erase": actions.erase}[kind]
        work = Action(id_slot, lambda slot: act(slot, id_slot, filename, failure))
        results: asyncio.Queue[Event] = asyncio.Queue()
        if self.faults.late_actions:
            self._queue_late(work, results)
            task = None
        else:
            task = self.engine.submit(work, results)
        reply = await self.waiting.next(request, results, [task] if task else [], keep=task is None)
        if not isinstance(reply, dict):
            return web.Response()
        if failure is Failure.LOST_ANSWER:
            return await self.waiting.fail(request, Failure.CLOSE)
        if failure is Failure.GARBAGE:
            return web.Response(text='{"id_slot":', content_type="application/json")
        return json_response(reply["body"], reply["status"])

    def _queue_late(self, work: Action, results: asyncio.Queue[Event]) -> None:
        async def later() -> None:
            await asyncio.sleep(self.faults.late_actions)
            self.engine.submit(work, results)

        task = asyncio.get_running_loop().create_task(later())
        self.late.add(task)
        task.add_done_callback(self.late.discard)

    def stop(self) -> None:
        for task in self.late:
            task.cancel()
