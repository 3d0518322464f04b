"""Hand-written stand-ins for what the core works with: a llama-server's management side, a store, files.

All write into one `log`, so that a test sees the order of calls across them. Nothing here waits for time:
an action is answered when it is asked, or, if it is `LATE`, when the test says so.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from kvproxy.checkpoint.actions import SlotActions
from kvproxy.checkpoint.candidates import Chooser
from kvproxy.checkpoint.checkpointer import Checkpointer
from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.policy import CheckpointPolicy
from kvproxy.checkpoint.preparer import Preparer
from kvproxy.checkpoint.restorer import Restorer
from kvproxy.checkpoint.shaper import Shaper
from kvproxy.identifiers import Epoch, Owner, Revision, ServerName, SessionKey, SlotId, SnapshotName, short
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.sessions.session import Session
from kvproxy.slotfile.prefix import Prefix, Uncut
from kvproxy.slotfile.window import Closed
from kvproxy.slots.leases import LeaseDesk
from kvproxy.slots.slot import Occupancy
from kvproxy.slots.table import SlotTable
from kvproxy.snapshots.alterations import Alteration, Alterations
from kvproxy.snapshots.canaries import Canaries
from kvproxy.snapshots.checks import Sight
from kvproxy.snapshots.files import FileCheck
from kvproxy.snapshots.fingerprint import Fingerprint
from kvproxy.snapshots.index import SnapshotIndex, Totals
from kvproxy.snapshots.manifest import (
    FileIdentity,
    Generation,
    Manifest,
    generation_to_restore,
    with_generation,
    without_generations,
)
from kvproxy.snapshots.memory_kind import MemoryKind
from kvproxy.snapshots.names import new_name
from kvproxy.snapshots.store import Publication, Published, Removed, StoreFailure
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.events import Event, TaskDied
from kvproxy.upstream.acquaintance import Introduction
from kvproxy.upstream.breaker import Breaker
from kvproxy.upstream.facts import Facts, Persistence, PersistenceMode, ServerState, Standing
from kvproxy.upstream.findings import WatchParts
from kvproxy.upstream.replies import (
    ActionFailure,
    Completed,
    Erased,
    Fault,
    Obstacle,
    Props,
    Restored,
    Saved,
    SlotInfo,
    Unavailable,
)
from kvproxy.upstream.trial import NOTHING_SEEN, Trial
from tests.support.clock import FakeClock

E = TypeVar("E")

MAIN = ServerName("main")
OWNER = Owner("0123abcd")
A, B, C = (SessionKey(letter * 32) for letter in "abc")
FINGERPRINT = Fingerprint.from_dict({"model_path": "/models/one.gguf", "build": "b11434"})
PROPS = Props(
    total_slots=2,
    n_ctx=4096,
    model_path="/models/one.gguf",
    model_alias="one",
    model_ftype="F16",
    build="b11434",
    marker="<__media_1__>",
    is_sleeping=False,
    modalities=(),
)
UNREACHABLE = Unavailable(Obstacle.UNREACHABLE, "connection refused")


@dataclass
class Sink:
    """Keeps what was emitted."""

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


async def settle(turns: int = 20) -> None:
    """Let every task run until it waits for something that is not the loop's next turn."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Late:
    """An action that goes past its deadline and ends when the test calls `end`."""

    def __init__(self) -> None:
        self.fate: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def end(self, result: object) -> None:
        self.fate.set_result(result)


class FakeAction:
    def __init__(self, answer: object) -> None:
        self._answer = answer

    @property
    def done(self) -> bool:
        return not isinstance(self._answer, Late) or self._answer.fate.done()

    async def wait(self, timeout: float) -> Any:
        if isinstance(self._answer, Late):
            return ActionFailure(Fault.TIMED_OUT, f"no answer within {timeout:.3g} s")
        await asyncio.sleep(0)
        return await _answer(self._answer)

    async def fate(self) -> Any:
        return await self._answer.fate if isinstance(self._answer, Late) else await _answer(self._answer)


async def _answer(answer: object) -> object:
    """What an answer is now: one that is a function happens while it is waited for."""
    value = answer() if callable(answer) else answer
    # As with a real call: it goes on when the one who waits for it is cancelled.
    return await asyncio.shield(value) if asyncio.isfuture(value) or asyncio.iscoroutine(value) else value


@dataclass
class FakeServer:
    """`answers[verb]` are given in turn, the last one again and again."""

    log: list[str] = field(default_factory=list)
    answers: defaultdict[str, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    patience: dict[str, float] = field(default_factory=dict)
    """The timeout of the last question of each kind."""
    base_url: str = "http://llama:8080"

    def answer(self, verb: str, *answers: object) -> None:
        self.answers[verb] = deque(answers)

    def _next(self, verb: str, otherwise: object) -> Any:
        queue = self.answers[verb]
        if not queue:
            return otherwise
        return queue.popleft() if len(queue) > 1 else queue[0]

    def start_save(self, slot: SlotId, name: SnapshotName) -> Any:
        self.log.append(f"save {slot}")
        return FakeAction(self._next("save", Saved(1000, 5000)))

    def start_restore(self, slot: SlotId, name: SnapshotName) -> Any:
        self.log.append(f"restore {slot} {name}")
        return FakeAction(self._next("restore", Restored(1000, 5000)))

    def start_erase(self, slot: SlotId) -> Any:
        self.log.append(f"erase {slot}")
        return FakeAction(self._next("erase", Erased(1)))

    async def apply_template(self, document: Mapping[str, object], timeout: float = 2.0) -> Any:
        """Each message is its role and text."""
        self.log.append("render")
        messages = cast(list[dict[str, str]], document["messages"])
        prompt = "".join(f"<{m['role']}>{m.get('content') or ''}" for m in messages)
        return await _answer(self._next("render", prompt + "<assistant>"))

    async def tokenize(self, text: str, timeout: float = 2.0, *, as_prompt: bool = False) -> Any:
        """Each character is a token."""
        return await _answer(self._next("tokenize", tuple(text.encode())))

    async def complete(self, slot: SlotId, prompt: Sequence[int], *, n_predict: int, timeout: float) -> Any:
        self.log.append(f"evaluate {slot} {len(prompt)}")
        self.patience["complete"] = timeout
        return await _answer(self._next("complete", Completed(1, len(prompt) - 1)))

    async def props(self, timeout: float = 2.0) -> Any:
        self.log.append("props")
        self.patience["props"] = timeout
        return await _answer(self._next("props", PROPS))

    async def settled(self, timeout: float) -> Any:
        self.log.append("settled")
        return await _answer(self._next("settled", True))

    async def slots(self, timeout: float = 2.0) -> Any:
        self.log.append("slots")
        return await _answer(self._next("slots", (idle(0), idle(1))))

    async def model_meta(self, timeout: float = 2.0) -> Any:
        self.patience["meta"] = timeout
        return await _answer(self._next("meta", {"n_vocab": 100}))

    async def adapters(self, timeout: float = 2.0) -> Any:
        self.log.append("adapters")
        return await _answer(self._next("adapters", ()))

    async def likely_next(self, slot: SlotId, prompt: str, *, top: int, timeout: float) -> Any:
        self.log.append(f"canary {slot}")
        self.patience["canary"] = timeout
        return await _answer(self._next("canary", ((1, -0.5), (2, -1.5))))

    async def actions_supported(self, timeout: float = 2.0) -> Any:
        self.log.append("supported?")
        self.patience["supported"] = timeout
        return await _answer(self._next("supported", None))


def idle(slot: int, *, tokens: int | None = None, task: int | None = None) -> SlotInfo:
    return SlotInfo(SlotId(slot), False, task, tokens, 0)


def processing(slot: int, *, task: int | None = None, progress: int = 1) -> SlotInfo:
    return SlotInfo(SlotId(slot), True, task, 10, progress)


@dataclass
class FakeFiles:
    """`bad` are names that no longer are what was published, with the reason."""

    log: list[str] = field(default_factory=list)
    is_visible: bool = True
    saved: Any = field(default_factory=FileCheck)
    durable: Any = field(default_factory=FileCheck)
    bad: dict[SnapshotName, str] = field(default_factory=dict)
    absence: str = ""
    """Why the whole directory is out of sight."""
    deleted: list[SnapshotName] = field(default_factory=list)
    left_behind: list[SnapshotName] = field(default_factory=list)
    seen: FileIdentity | None = None
    sha256: str | None = None
    kind: MemoryKind = MemoryKind.UNKNOWN
    streams: int | None = None
    sight: Sight = field(default_factory=Sight)
    free: list[int | None] = field(default_factory=lambda: [None])
    """Given in turn, the last one again and again."""
    ids: str | None = None
    ids_read: int = 0
    shared: int | None = None
    shut: Closed | None = None
    uncut: Uncut | None = None
    made: list[SnapshotName] = field(default_factory=list)
    """Copies and cuts."""

    async def verify_saved(self, name: SnapshotName, saved: Saved) -> Any:
        return await _answer(self.saved)

    async def make_durable(self, name: SnapshotName) -> Any:
        return await _answer(self.durable)

    async def verify_stored(self, generation: Generation) -> FileCheck:
        if self.absence:
            return FileCheck(self.absence, is_out_of_sight=True)
        return FileCheck(self.bad.get(generation.name, ""), self.seen)

    async def ids_digest(self, name: SnapshotName) -> str | None:
        self.ids_read += 1
        return self.ids

    async def digest(self, name: SnapshotName, identity: FileIdentity | None = None) -> str | None:
        return self.sha256

    async def delete(self, name: SnapshotName) -> bool:
        self.log.append("delete")
        self.deleted.append(name)
        return self.is_visible

    async def orphans(self, known: Collection[SnapshotName], owner: Owner) -> tuple[SnapshotName, ...]:
        return tuple(name for name in self.left_behind if name not in known)

    async def kind_of(self, name: SnapshotName) -> MemoryKind:
        return self.kind

    async def shared_tokens(self, name: SnapshotName, ids: Sequence[int]) -> int | None:
        return self.shared

    async def open_window(self, name: SnapshotName, copy: SnapshotName, window: int) -> Closed | None:
        self.log.append(f"open {window}")
        if self.shut is None:
            self.made.append(copy)
        return self.shut

    async def cut_prefix(self, name: SnapshotName, cut: SnapshotName, tokens: int) -> Prefix | Uncut:
        self.log.append(f"cut {tokens}")
        if self.uncut is not None:
            return self.uncut
        self.made.append(cut)
        return Prefix(tokens, 10 * tokens)

    async def streams_of(self, name: SnapshotName) -> int | None:
        return self.streams

    async def free_bytes(self) -> int | None:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]

    async def at_sight(self, generations: Collection[Generation]) -> Sight:
        return self.sight

    async def check_usable(self) -> str | None:
        return None


@dataclass
class FakeScratch:
    """Names for a moment, and which were deleted."""

    deleted: list[SnapshotName] = field(default_factory=list)
    is_visible: bool = True
    streams: int | None = None

    async def streams_of(self, name: SnapshotName) -> int | None:
        return self.streams

    def new_name(self) -> SnapshotName:
        return new_name(OWNER)

    async def delete(self, name: SnapshotName) -> bool:
        self.deleted.append(name)
        return True


class FakeStore:
    """A store without a disk. `fails` makes publications fail, `mark_fails` marks of a restore."""

    owner = OWNER
    is_open = True
    fault = ""
    free: int | None = None

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.index = SnapshotIndex()
        self.marks: set[SnapshotName] = set()
        self.touched: list[SessionKey] = []
        self.fails = False
        self.mark_fails = False
        self.while_marking: Callable[[], object] = lambda: None

    def find(self, key: SessionKey, fingerprint: Fingerprint) -> Manifest | None:
        return self.index.find(key, fingerprint)

    def find_any(self, key: SessionKey) -> tuple[Manifest, ...]:
        return self.index.find_any(key)

    def all(self) -> tuple[Manifest, ...]:
        return tuple(self.index)

    def names(self) -> set[SnapshotName]:
        return self.index.names()

    def totals(self) -> Totals:
        return self.index.totals()

    def restoring(self) -> frozenset[SnapshotName]:
        return frozenset(self.marks)

    async def publish(self, publication: Publication) -> Published | StoreFailure:
        self.log.append("publish")
        if self.fails:
            return StoreFailure("the disk is full")
        old = self.index.find(publication.key, publication.fingerprint)
        new = manifest_of(
            publication.key,
            publication.generation,
            generation_to_restore(old) if old else None,
            fingerprint=publication.fingerprint,
        )
        self.index.put(new)
        was = old.generations if old else ()
        return Published(new, tuple(one.name for one in was if one not in new.generations))

    async def amend(
        self, key: SessionKey, fingerprint: Fingerprint, name: SnapshotName, **learned: object
    ) -> Manifest | None:
        if (found := self.index.find(key, fingerprint)) is None:
            return None
        changes = {field: value for field, value in learned.items() if value is not None}
        self.index.put(with_generation(found, name, **changes))
        return self.index.find(key, fingerprint)

    async def why_unusable(self) -> str:
        return self.fault

    async def free_bytes(self) -> int | None:
        return self.free

    async def invalidate(
        self, key: SessionKey, fingerprint: Fingerprint, name: SnapshotName, reason: str
    ) -> Manifest | None:
        self.log.append("invalidate")
        if (found := self.index.find(key, fingerprint)) is None:
            return None
        self.index.put(with_generation(found, name, invalid_reason=reason))
        return self.index.find(key, fingerprint)

    def touch(self, key: SessionKey, fingerprint: Fingerprint) -> None:
        self.touched.append(key)

    async def delete(self, key: SessionKey) -> Removed:
        return await self.forget({one.name for m in self.find_any(key) for one in m.generations})

    async def forget(self, names: Collection[SnapshotName]) -> Removed:
        gone: list[SnapshotName] = []
        for manifest in self.all():
            gone += [one.name for one in manifest.generations if one.name in names]
            rest = without_generations(manifest, names)
            self.index.remove(manifest)
            if rest is not None:
                self.index.put(rest)
        return Removed(tuple(gone))

    async def mark_restoring(self, name: SnapshotName) -> StoreFailure | None:
        self.log.append("mark")
        self.marks.add(name)
        self.while_marking()
        return StoreFailure("the disk is full") if self.mark_fails else None

    async def clear_restoring(self, name: SnapshotName) -> StoreFailure | None:
        self.log.append("clear")
        self.marks.discard(name)
        return None


def generation_of(**changes: Any) -> Generation:
    made = Generation(
        name=new_name(OWNER),
        tokens=1000,
        size_bytes=5000,
        revision=Revision(1),
        saved_at=900.0,
        slot=SlotId(0),
    )
    return made.model_copy(update=changes)


def manifest_of(
    key: SessionKey,
    current: Generation | None = None,
    previous: Generation | None = None,
    *,
    fingerprint: Fingerprint = FINGERPRINT,
    **changes: Any,
) -> Manifest:
    made = Manifest(
        key=key,
        server=MAIN,
        model="/models/one.gguf",
        client_digest="d" * 32,
        fingerprint=fingerprint,
        current=current or generation_of(),
        previous=previous,
        created_at=800.0,
        last_used_at=900.0,
    )
    return made.model_copy(update=changes)


def stay(key: SessionKey, *, revision: int = 1, saved: int = 0, tokens: int | None = 1000) -> Occupancy:
    """A session's stay in a slot: dirty unless `saved` equals `revision`."""
    return Occupancy(key, Revision(revision), Revision(saved), tokens, unsaved_tokens=10)


async def try_nothing_out(slots: object) -> Trial:
    return NOTHING_SEEN


class World:
    """The core of one server with `slots` slots seen idle, persistence on, and nobody in them."""

    def __init__(
        self,
        *,
        slots: int = 2,
        policy: CheckpointPolicy | None = None,
        is_strict: bool = False,
        on_switch: bool = True,
        verify: bool = True,
        restores: bool = True,
        max_failures: int = 3,
        timeout_seconds: float = 30.0,
    ) -> None:
        self.log: list[str] = []
        self.sink = Sink()
        self.clock = FakeClock()
        self.server = FakeServer(self.log)
        self.files = FakeFiles(self.log)
        self.store = FakeStore(self.log)
        self.standing = Standing()
        self.table = SlotTable(self.clock)
        self.registry = SessionRegistry(self.clock)
        self.changes = 0
        self.emptied: list[SlotId] = []
        self.on_confirm: Callable[[], object] = lambda: None
        self.unable: list[str] = []
        self.shares: list[bool] = []
        self.tasks = TaskSet(lambda name, error: self.sink(TaskDied(name, error)))
        self.desk = LeaseDesk(
            self.table, self.clock, max_waiting=8, max_wait_seconds=5.0, on_change=lambda: None
        )
        self.breaker = Breaker(max_failures, 60.0)
        self.actions = SlotActions(
            MAIN,
            self.breaker,
            epoch=lambda: self.table.epoch,
            clock=self.clock,
            emit=self.sink,
            tasks=self.tasks,
        )
        self.policy = policy or CheckpointPolicy()
        self.alterations = Alterations(frozenset(Alteration))
        self.parts = self._parts()
        self.shaper = Shaper(self.parts)
        self.checkpointer = Checkpointer(
            self.parts, self.policy, self.shaper, timeout_seconds=timeout_seconds
        )
        self.canaries = Canaries()
        chooser = Chooser(cast(Any, self.store), self.canaries, accepts_other_builds=True)
        self.restorer = Restorer(
            self.parts, chooser, is_enabled=restores, verify=verify, timeout_seconds=timeout_seconds
        )
        self.preparer = Preparer(
            self.parts,
            self.checkpointer,
            self.restorer,
            on_switch=on_switch,
            is_strict=is_strict,
            borrow=self.desk.borrow,
            look=self._look_at_slots,
        )
        self.live(slots)

    def _parts(self) -> Parts:
        return Parts(
            MAIN,
            cast(Any, self.server),
            self.standing,
            self.table,
            self.actions,
            cast(Any, self.files),
            cast(Any, self.store),
            self.registry,
            self.tasks,
            self.clock,
            self.sink,
            slots_changed=self._changed,
            emptied=self._emptied,
            unable=self._unable,
            alterations=self.alterations,
            shares=self._shares,
            found_kind=self._found_kind,
        )

    def watch_parts(self, *, setting: MemoryKind | None = None, **changes: Any) -> WatchParts:
        """Of one who meets the server; with a line that stands, and nothing tried out, unless changed."""
        introduction = Introduction(
            cast(Any, self.server),
            self.canaries,
            self.sink,
            runtime_key=None,
            setting=setting,
            scratch=FakeScratch(),
        )
        otherwise: dict[str, Any] = {
            "line_stands": lambda: True,
            "look": lambda: None,
            "process_changed": lambda: None,
            "try_out": try_nothing_out,
        }
        return WatchParts(
            MAIN,
            cast(Any, self.server),
            self.standing,
            self.table,
            self.desk,
            self.registry,
            self.tasks,
            self.clock,
            self.sink,
            introduction,
            **(otherwise | changes),
        )

    def _unable(self, epoch: Epoch, reason: str, *, still_saves: bool = False) -> None:
        if epoch == self.table.epoch:
            self.standing.set(persistence=Persistence(PersistenceMode.OFF, reason, still_saves))
            self.unable.append(reason)

    def _shares(self, epoch: Epoch, shares: bool) -> None:
        self.shares.append(shares)

    def _found_kind(self, epoch: Epoch, kind: MemoryKind) -> None:
        self.standing.set(kind=kind)

    async def _look_at_slots(self) -> None:
        self.table.seen(await self.server.slots(), self.clock.now())

    def _changed(self) -> None:
        self.changes += 1

    def _emptied(self, slot: SlotId) -> None:
        self.emptied.append(slot)

    async def confirm(self) -> None:
        """The server is asked whether it is the same; `on_confirm` is what comes of it."""
        self.on_confirm()

    def live(self, slots: int = 2) -> Epoch:
        """A new life of the server, its slots seen idle and blank."""
        epoch = self.table.begin_epoch(slots)
        self.desk.epoch_began()
        self.table.seen([idle(n) for n in range(slots)])
        props = replace(PROPS, total_slots=slots)
        plain = Persistence(PersistenceMode.PLAIN)
        self.standing.facts = Facts(ServerState.HEALTHY, "", props, FINGERPRINT, plain)
        self.desk.resume()
        return epoch

    def turn_off(self, reason: str = "no save path") -> None:
        self.standing.set(persistence=Persistence(PersistenceMode.OFF, reason))

    def session(self, key: SessionKey, **changes: Any) -> Session:
        session = self.registry.touch(key, "d" * 32, "/models/one.gguf")
        for name, value in changes.items():
            setattr(session, name, value)
        return session

    def house(self, slot: int, occupancy: Occupancy) -> None:
        """Let a session have been served in `slot`."""
        self.session(occupancy.session)
        self.table.serve(SlotId(slot), self.table.epoch, occupancy)
        self.table.served(SlotId(slot), self.table.epoch, occupancy)

    def keep(self, manifest: Manifest) -> Manifest:
        """Let it be stored."""
        self.store.index.put(manifest)
        return manifest

    def state(self, slot: int = 0) -> str:
        return self.table.view(SlotId(slot)).state.value

    def occupant(self, slot: int = 0) -> str | None:
        occupant = self.table.view(SlotId(slot)).occupant
        return None if occupant is None else short(occupant)
