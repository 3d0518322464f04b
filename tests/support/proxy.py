"""A whole kvproxy in this process, on a free port, in front of whatever llama-server a test gives it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
from aiohttp import web

from kvproxy.checkpoint.rounds import Flushed
from kvproxy.clock import Clock
from kvproxy.proxy.server import create_runner
from kvproxy.settings.model import Settings
from kvproxy.telemetry.bus import EventBus
from kvproxy.telemetry.events import Event, RequestDone, TaskDied
from kvproxy.upstream.messages_pin import QUESTION
from kvproxy.upstream.trial import PROBES
from kvproxy.wiring import Runtime
from scripts.ports import free_port
from tests.fakes.app import Call
from tests.fakes.llama_server import FakeLlamaServer
from tests.support.talk import Answer, Stream, Talk, answer_of

E = TypeVar("E", bound=Event)

QUIET: dict[str, dict[str, Any]] = {
    "checkpoint": {
        "min_tokens": 0,
        "on_idle_seconds": 0,
        "max_dirty_seconds": 0,
        "max_unsaved_tokens": 0,
        "timeout_seconds": 10,
    },
    "restore": {"timeout_seconds": 10},
    "server": {"listen": "127.0.0.1:0"},
    "queue": {"max_wait_seconds": 20},
}
"""Nothing is saved but where a slot changes hands, and nothing is too small for it."""


STANDING = (
    "sentinel",
    "watch",
    "probe",
    "rounds",
    "keeper",
    "living slots",
    "late canary",
    "inspection",
    "memory of conversations",
)
"""The tasks that run for as long as a runtime does."""


def make_settings(url: str, state_dir: Path, snapshot_dir: Path | None = None, **sections: Any) -> Settings:
    """Keywords are sections of the settings, merged over `QUIET`; `upstream` is the entry of upstreams."""
    upstream = {"url": url, "connect_timeout_seconds": 5, **sections.pop("upstream", {})}
    if snapshot_dir is not None:
        upstream["snapshot_dir"] = str(snapshot_dir)
    merged = {name: {**QUIET.get(name, {}), **sections.get(name, {})} for name in {*QUIET, *sections}}
    return Settings.model_validate({"state_dir": str(state_dir), "upstreams": [upstream], **merged})


class KvProxy:
    """`async with KvProxy(settings) as proxy`: started, listening, and stopped without a drain at the end.

    Leaving the block fails if a background task died.
    """

    def __init__(self, settings: Settings, *, clock: Clock | None = None) -> None:
        self.settings = settings
        self.events: list[Event] = []
        self._clock = clock
        self._port = free_port()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        assert [event for event in self.events if isinstance(event, TaskDied)] == []

    async def start(self) -> None:
        """Also a second time, as a process that is started again: on the same port."""
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.runtime = Runtime(self.settings, bus=bus, clock=self._clock)
        try:
            await self.runtime.start()
        except BaseException:
            await self.runtime.stop()
            raise
        self._runner = create_runner(self.runtime.face.handle, shutdown_seconds=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        # No pool: a test's requests must not meet in a connection.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self.client = aiohttp.ClientSession(self.base_url, connector=connector)

    async def stop(self) -> None:
        """Without a drain: whatever was not saved is lost."""
        await self.client.close()
        await self._runner.cleanup()
        await self.runtime.stop()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def drain(self, seconds: float = 5.0) -> Flushed:
        return await self.runtime.drain(seconds)

    @property
    def port(self) -> int:
        return self._port

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    # -- asking ------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until the server is known and usable."""
        await self.until(lambda: self.runtime.standing.facts.state.has_slots and not self.is_suspended)

    async def turn(self, talk: Talk, *, path: str = "/v1/chat/completions", **body: Any) -> Answer:
        """One turn of a conversation, to its end; the answer becomes part of it."""
        answer = await self.post(path, talk.body(**body), **talk.headers)
        if answer.status == 200:
            talk.heard(answer.text)
        return answer

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        kind = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.client.post(path, headers=named, **kind) as response:
            return await answer_of(response)

    async def get(self, path: str, **headers: str) -> Answer:
        async with self.client.get(path, headers=headers) as response:
            return await answer_of(response)

    @asynccontextmanager
    async def stream(self, talk: Talk, **body: Any) -> AsyncIterator[Stream]:
        """A streamed turn under way, its headers there; leaving the block closes the connection."""
        document = talk.body(stream=True, **body)
        request = self.client.post("/v1/chat/completions", json=document, headers=talk.headers)
        async with request as response:
            yield Stream(response)
            response.close()

    async def admin(self, method: str, path: str, **headers: str) -> Answer:
        async with self.client.request(method, f"/kvproxy/{path}", headers=headers) as response:
            return await answer_of(response)

    async def status(self) -> Any:
        return (await self.admin("GET", "status")).body

    # -- looking -----------------------------------------------------------------------------------------

    @property
    def is_suspended(self) -> bool:
        return self.runtime.desk.is_suspended

    @property
    def slot_states(self) -> list[str]:
        return [view.state.value for view in self.runtime.table.views()]

    @property
    def busy_tasks(self) -> list[str]:
        """The names of tasks that are neither standing ones nor a question to the server."""
        names = (task.get_name() for task in self.runtime.tasks._tasks)
        return [name for name in names if name not in (*STANDING, "ask the server")]

    def heard(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def done(self) -> list[RequestDone]:
        return self.heard(RequestDone)

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        await eventually(condition, seconds)

    async def at_rest(self, seconds: float = 10.0) -> None:
        """Wait until no lease is out, nobody waits, every slot is known and no task is left over."""
        desk, table = self.runtime.desk, self.runtime.table
        await self.until(
            lambda: not (desk.out or desk.waiting or table.unsettled or self.busy_tasks), seconds
        )


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return as soon as `condition` holds; TimeoutError if it does not within `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.002)


class House:
    """A fake llama-server, its save directory, and a kvproxy before it."""

    def __init__(self, fake: FakeLlamaServer, proxy: KvProxy, slot_dir: Path) -> None:
        self.fake = fake
        self.proxy = proxy
        self.slot_dir = slot_dir

    @property
    def state_dir(self) -> Path:
        return Path(self.proxy.settings.state_dir)

    @property
    def deeds(self) -> list[tuple[str, int | None]]:
        """Slot actions that reached the server, in order. The proxy's own questions at start are none."""
        asked = (call for call in without_trials(self.fake.calls) if call.action and call.filename != "/")
        return [(call.action or "", call.slot) for call in asked]

    def forget_calls(self) -> None:
        self.fake.calls.clear()

    @property
    def open_requests(self) -> int:
        """How many requests the server has in hand whose connection still stands."""
        life = self.fake._life
        used = life.api.wire._usage.items() if life is not None else ()
        return sum(
            usage.running for line, usage in used if line.transport and not line.transport.is_closing()
        )

    @property
    def processing(self) -> list[int]:
        """The slots in which the server runs something."""
        return [slot.id for slot in self.fake.slots if slot.is_processing]

    def completions(self) -> int:
        """How many requests that compute have reached the server."""
        calls = without_trials(self.fake.calls)
        return sum(call.path.endswith(("completions", "completion")) for call in calls)

    @property
    def files(self) -> list[Path]:
        return sorted(self.slot_dir.iterdir())

    def manifests(self) -> list[Path]:
        return sorted((self.state_dir / "manifests").iterdir())


def without_trials(calls: Sequence[Call]) -> list[Call]:
    """`calls` less those by which the proxy tries out, as a life begins, what the server does not tell of its
    slots, and whether `/v1/messages` can be pinned: short prompts, a save of the first, and an erase for each
    slot they ran in."""
    rest, erases = [], 0
    for call in calls:
        is_trial = call.path == "/completion" and _prompt(call.body) in PROBES
        is_trial = is_trial or (call.path == "/v1/messages" and QUESTION.encode() in call.body)
        erases += is_trial
        if call.action == "erase" and erases:
            erases -= 1
        elif not is_trial and not (call.action == "save" and erases):
            rest.append(call)
    return rest


def _prompt(body: bytes) -> tuple[int, ...]:
    prompt = json.loads(body).get("prompt", ())
    return tuple(prompt) if isinstance(prompt, list) else ()


@asynccontextmanager
async def house(
    tmp_path: Path, *, slots: int = 1, shared: bool = True, persists: bool = True, **options: Any
) -> AsyncIterator[House]:
    """Keywords in lower case that name a section go to kvproxy, all others to the fake.

    Leaving it without an error asks for order: no lease out, no task left over, nobody met in a slot.
    """
    sections = {name: options.pop(name) for name in tuple(options) if name in _SECTIONS}
    slot_dir, state_dir = tmp_path / "slots", tmp_path / "state"
    slot_dir.mkdir(exist_ok=True)
    async with FakeLlamaServer(
        slots=slots, slot_dir=slot_dir if persists else None, **{"http_poll": 0.1, **options}
    ) as fake:
        settings = make_settings(fake.base_url, state_dir, slot_dir if shared else None, **sections)
        async with KvProxy(settings) as proxy:
            await proxy.ready()
            here = House(fake, proxy, slot_dir)
            here.forget_calls()  # what a new life is asked
            yield here
            await proxy.at_rest()
            assert fake.violations == []


_SECTIONS = frozenset({*Settings.model_fields, "upstream"}) - {"upstreams", "state_dir"}
