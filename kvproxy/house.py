"""All parts of a running kvproxy, put together: the only place that knows everything. Nothing starts here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from kvproxy import assembly
from kvproxy.admin.app import AdminFace, AdminParts
from kvproxy.checkpoint.actions import SlotActions
from kvproxy.checkpoint.candidates import Chooser
from kvproxy.checkpoint.checkpointer import Checkpointer
from kvproxy.checkpoint.mooring import Moorings
from kvproxy.checkpoint.parts import Parts
from kvproxy.checkpoint.preparer import Preparer
from kvproxy.checkpoint.restorer import Restorer
from kvproxy.checkpoint.rounds import Rounds
from kvproxy.checkpoint.shaper import Shaper
from kvproxy.clock import Clock, SystemClock
from kvproxy.dialects.endpoints import LABELS
from kvproxy.errors import ErrorCode, StateDirError, StateDirTaken
from kvproxy.identifiers import Revision, ServerName, SessionKey
from kvproxy.proxy.app import ClientFace, FaceParts
from kvproxy.proxy.exchange import Exchange
from kvproxy.proxy.holding import Holder
from kvproxy.proxy.pinned import PinnedRequests
from kvproxy.proxy.sorter import Sorter
from kvproxy.proxy.steering import Steering
from kvproxy.proxy.unpinned import UnpinnedRequests
from kvproxy.sessions.branches import Branches
from kvproxy.sessions.memory import BranchMemory
from kvproxy.sessions.registry import SessionRegistry
from kvproxy.settings.model import Settings
from kvproxy.slots.leases import LeaseDesk
from kvproxy.slots.needs import Needs
from kvproxy.slots.table import SlotTable
from kvproxy.snapshots.alterations import Alteration
from kvproxy.snapshots.canaries import Canaries
from kvproxy.snapshots.inspection import Inspection
from kvproxy.snapshots.keeping import Keeper
from kvproxy.snapshots.store import SnapshotStore
from kvproxy.tasks import TaskSet
from kvproxy.telemetry.bus import EventBus
from kvproxy.telemetry.events import TaskDied, Warned
from kvproxy.telemetry.metrics import Metrics
from kvproxy.telemetry.tally import Tally
from kvproxy.upstream.breaker import Breaker
from kvproxy.upstream.client import LlamaServer
from kvproxy.upstream.facts import Standing
from kvproxy.upstream.findings import WatchParts
from kvproxy.upstream.late_canary import LateCanary
from kvproxy.upstream.living import LivingSlots
from kvproxy.upstream.messages_pin import honours_messages_pin
from kvproxy.upstream.obstruction import Obstruction
from kvproxy.upstream.probe import Probe
from kvproxy.upstream.transport import Transport
from kvproxy.upstream.trial import try_out
from kvproxy.upstream.volatility import Volatility
from kvproxy.upstream.watch import Watch


class House:
    """The parts, made from settings inside a loop."""

    def __init__(
        self, settings: Settings, *, bus: EventBus | None = None, clock: Clock | None = None
    ) -> None:
        self.settings = settings
        self.clock = clock or SystemClock()
        self.bus = bus or EventBus()
        self.tasks = TaskSet(lambda name, error: self.bus.emit(TaskDied(name, error)))
        self.is_started = False
        self.is_draining = False
        self.is_ending = False
        self._build_listeners()
        self._build_server()
        self._build_persistence()
        self._build_faces()

    # -- building --------------------------------------------------------------------------------------------

    def _build_listeners(self) -> None:
        self.upstream = self.settings.upstreams[0]
        self.server = ServerName(self.upstream.name)
        self.tally = Tally()
        self.metrics = Metrics([self.server], LABELS)
        self.bus.subscribe(self.tally.hear, *self.tally.hears)
        self.bus.subscribe(self.metrics.hear, *self.metrics.hears)

    def _build_server(self) -> None:
        settings, upstream = self.settings, self.upstream
        self.client = LlamaServer(
            upstream.url,
            upstream.api_key,
            connect_timeout_seconds=upstream.connect_timeout_seconds,
            on_failure=lambda name, error: self.bus.emit(TaskDied(name, error)),
        )
        self.transport = Transport(upstream.url, self.clock, connect_timeout=upstream.connect_timeout_seconds)
        self.standing = Standing()
        self.table = SlotTable(self.clock)
        self.branches = Branches()
        self.memory = BranchMemory(Path(settings.state_dir), self.branches)
        self.registry = SessionRegistry(self.clock, on_forget=self.branches.forget)
        self.desk = LeaseDesk(
            self.table,
            self.clock,
            max_waiting=settings.queue.max_waiting,
            max_wait_seconds=settings.queue.max_wait_seconds,
            on_change=lambda: self.rounds.slots_changed(),
            on_unseen=lambda: self.probe.want(),
            set_apart=upstream.set_apart,
        )
        self.probe = Probe(
            self.client,
            self.table,
            self.desk,
            self.standing,
            self.clock,
            on_foreign=lambda slots: self.watch.findings.found_foreign(slots),
            on_look=lambda infos, began: self.volatility.judge(infos, began),
        )
        self.alterations = assembly.alterations_of(settings)
        self.canaries = Canaries(Path(settings.state_dir) / "canaries.json")
        scratch = assembly.Scratch(lambda: self.store.owner, lambda: self.files)
        self.watch_parts = WatchParts(
            self.server,
            self.client,
            self.standing,
            self.table,
            self.desk,
            self.registry,
            self.tasks,
            self.clock,
            self.bus.emit,
            assembly.introduction_of(
                upstream,
                self.client,
                self.canaries,
                self.bus.emit,
                scratch,
                self.standing,
                opens_windows=lambda present: self.alterations.may(Alteration.WINDOW_EDIT, present),
            ),
            line_stands=lambda: self.sentinel.connected,
            look=self.probe.want,
            process_changed=self.transport.drop_idle,
            readopt=lambda props, slots: self.living.readopt(props, slots),
            try_out=lambda slots: try_out(self.client, slots, scratch),
            honours_messages_pin=lambda slots: honours_messages_pin(self.client, slots),
        )
        self.watch = Watch(self.watch_parts)
        self.living = LivingSlots(
            Path(settings.state_dir) / f"living-{self.server}.json",
            self.server,
            self.client,
            self.standing,
            self.table,
            self.desk,
            self.registry,
            self.clock,
            self.watch.refresh,
            lambda infos, began: self.volatility.judge(infos, began),
            self.watch.renew,
        )
        self.volatility = Volatility(
            self.client,
            self.table,
            self.standing,
            self.tasks,
            self.clock,
            on_proof=self.watch.findings.found_volatile,
            on_crowd=self.watch.findings.found_shared,
            on_look=self.probe.look_for_foreign,
        )
        self.sentinel = assembly.sentinel_of(upstream.url, upstream.api_key, self.watch, self.clock)

    def _build_persistence(self) -> None:
        settings = self.settings
        self.store = SnapshotStore(Path(settings.state_dir), clock=self.clock, emit=self.bus.emit)
        self.files = assembly.files_of(self.upstream.snapshot_dir)
        breaker = Breaker(settings.failure.max_consecutive_failures, settings.failure.cooldown_seconds)
        self.actions = SlotActions(
            self.server,
            breaker,
            epoch=lambda: self.table.epoch,
            clock=self.clock,
            emit=self.bus.emit,
            tasks=self.tasks,
        )
        parts = Parts(
            self.server,
            self.client,
            self.standing,
            self.table,
            self.actions,
            self.files,
            self.store,
            self.registry,
            self.tasks,
            self.clock,
            self.bus.emit,
            slots_changed=self.desk.changed,
            emptied=self.watch.emptied,
            unable=self.watch.findings.found_unable,
            alterations=self.alterations,
            shares=self.watch.findings.found_shared,
            found_kind=self.watch.findings.found_kind,
        )
        self.policy = assembly.policy_of(settings.checkpoint)
        self.shaper = Shaper(parts)
        self.checkpointer = Checkpointer(
            parts, self.policy, self.shaper, timeout_seconds=settings.checkpoint.timeout_seconds
        )
        chooser = Chooser(
            self.store, self.canaries, accepts_other_builds=settings.restore.accept_other_builds
        )
        self.restorer = Restorer(
            parts,
            chooser,
            is_enabled=settings.restore.enabled,
            verify=settings.restore.verify,
            timeout_seconds=settings.restore.timeout_seconds,
        )
        self.restorer.about_to_restore = self.living.forget
        self.preparer = Preparer(
            parts,
            self.checkpointer,
            self.restorer,
            on_switch=settings.checkpoint.on_switch,
            is_strict=settings.failure.strict,
            borrow=self.desk.borrow,
            look=self.probe.look_once,
        )
        self.late_canary = LateCanary(self.watch_parts, self.watch, erase=self.preparer.erase)
        self.rounds = Rounds(
            self.table,
            self.desk,
            self.checkpointer,
            self.policy,
            self.actions.save_seconds,
            self.clock,
            self.watch.confirm,
        )
        self.keeper = Keeper(
            self.store,
            self.files,
            settings.retention,
            self.clock,
            self.bus.emit,
            lambda: self.checkpointer.names_in_flight() | self.restorer.cutter.names_in_flight(),
        )
        self.inspection = Inspection(
            self.store,
            self.files,
            self.bus.emit,
            open_state=self._open_state,
            on_obstacle=Obstruction(self.watch_parts, self.watch).set,
            look_for_room=self.checkpointer.room.look,
            on_gone=self._is_unsaved,
        )
        self.checkpointer.publisher.published = self.keeper.look
        self.checkpointer.room.make_room = self.keeper.collect

    def _is_unsaved(self, key: SessionKey) -> None:
        """What a slot holds of it is in no file any more."""
        for view in self.table.views():
            if view.occupant == key:
                self.table.checkpointed(view.id, self.table.epoch, key, Revision(0))

    def _build_faces(self) -> None:
        settings = self.settings
        holder = Holder(self.server, self.desk, self.watch, self.tasks, self.bus.emit)
        sender = assembly.sender_of(
            settings.server, self.upstream.api_key, self.transport, self.watch, self.desk
        )
        recogniser = assembly.recogniser_of(
            settings.sessions, self.server, self.registry, self.branches, self.memory, self.bus.emit
        )
        self.sorter = Sorter(self.server, settings.auxiliary, self.bus.emit)
        moorings = Moorings(self.table, self.checkpointer, self.policy)
        needs = Needs()
        pinned = PinnedRequests(
            self.table,
            holder,
            sender,
            self.preparer,
            self.restorer.proofs,
            self.checkpointer,
            self.shaper,
            moorings,
            self.probe,
            self.volatility,
            recogniser,
            self.policy,
            needs,
            self.watch.findings.found_shared,
            self.clock,
        )
        is_exact = settings.sessions.exact_messages
        unpinned = UnpinnedRequests(
            pinned,
            Steering(self.desk, self.preparer, self.shaper, recogniser, self.client, self.tasks, is_exact),
        )
        self.exchange = Exchange(
            self.server,
            holder,
            sender,
            pinned,
            unpinned,
            self.sorter,
            assembly.watchers_of(settings, self.server, self.tasks, self.bus.emit),
            recogniser,
            self.clock,
            self.bus.emit,
            is_ending=lambda: self.is_ending,
        )
        self.admin = AdminFace(
            AdminParts(
                self.server,
                self.upstream.url,
                self.standing,
                self.table,
                self.desk,
                self.registry,
                self.store,
                self.files,
                self.actions,
                self.rounds,
                self.preparer,
                self.keeper,
                self.tally,
                self.metrics,
                self.tasks,
                self.clock,
                settings.admin.token,
                settings.metrics.enabled,
                settings.metrics.public,
                is_draining=lambda: self.is_draining,
                lack=lambda: self.checkpointer.room.lack,
            )
        )
        self.face = ClientFace(
            FaceParts(
                self.server,
                self.exchange,
                self.admin.handle,
                self.bus.emit,
                settings.security.allowed_hosts,
                settings.security.allow_management,
                self.upstream.api_key is not None or bool(settings.security.api_keys),
                assembly.terms_of(settings),
                is_draining=lambda: self.is_draining,
                needs_documents=lambda: self.shaper.is_needed or self.restorer.cutter.is_wanted,
            )
        )

    # -- the state directory ---------------------------------------------------------------------------------

    async def _open_state(self) -> str:
        """Why it cannot be opened; empty once it is. What it holds is known from then on."""
        try:
            await self.store.open()
        except StateDirTaken as error:
            if not self.is_started:
                raise
            return str(error)
        except StateDirError as error:
            return str(error)
        for complaint in (await self.canaries.load(), await self.memory.load()):
            self._warn(complaint)
        self.tasks.keep(partial(self.memory.run, self._warn), name="memory of conversations")
        for m in self.store.all():
            self.registry.adopt(m.key, m.client_digest, m.model, m.last_used_at, m.current.revision)
        return ""

    def _warn(self, complaint: str | None) -> None:
        if complaint is not None:
            self.bus.emit(Warned(complaint, ErrorCode.METADATA_IO))
