"""Events as Prometheus metrics.

Counters and histograms follow the events; gauges are handed in at each scrape, because a gauge that is
counted up and down drifts with the first event that is missed. Every label value exists from the first
scrape: an alert on a rate sees the step from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from kvproxy import __version__
from kvproxy.checkpoint.outcome import CheckpointOutcome, Outcome, RestoreOutcome, Trigger
from kvproxy.identifiers import ServerName
from kvproxy.sessions.lines import Cause
from kvproxy.slots.state import SlotState
from kvproxy.telemetry import events as e
from kvproxy.upstream.breaker import BreakerState

CONTENT_TYPE = CONTENT_TYPE_LATEST
FAILURE_SOURCES = ("client", "upstream", "proxy")
RECOGNISED_BY = ("id", "content")

_OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_WORK_BUCKETS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)

Values = Iterable[str]
M = TypeVar("M", Counter, Gauge, Histogram)


@dataclass(frozen=True, slots=True)
class ServerGauges:
    """One server at the moment of a scrape. `slots` counts them by state."""

    name: ServerName
    is_up: bool = False
    breaker: BreakerState = BreakerState.CLOSED
    slots: Mapping[SlotState, int] = field(default_factory=dict)
    dirty_slots: int = 0
    waiting: int = 0
    lacks_room: bool = False


@dataclass(frozen=True, slots=True)
class Gauges:
    servers: tuple[ServerGauges, ...] = ()
    sessions: int = 0
    snapshots_valid: int = 0
    snapshots_invalid: int = 0
    snapshot_bytes: int = 0


class Metrics:
    """`hear` listens to events; `render` is what `/metrics` answers. Owns its registry."""

    def __init__(self, servers: Sequence[ServerName], endpoints: Sequence[str]) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._servers = tuple(servers)
        self._build_counters(endpoints)
        self._build_histograms()
        self._build_gauges()
        self._requests_by, self._prompt_tokens_by = _Children(self._requests), _Children(self._prompt_tokens)
        self._prepare_by, self._first_byte_by = _Children(self._prepare), _Children(self._first_byte)
        self._hearers: Mapping[type, Callable[[Any], None]] = {
            e.RequestDone: self._request_done,
            e.RequestFailed: self._request_failed,
            e.RestoreEnded: self._restore_ended,
            e.RestoreProvedIneffective: self._restore_ineffective,
            e.CheckpointEnded: self._checkpoint_ended,
            e.SlotAcquired: self._slot_acquired,
            e.SessionSwitched: self._session_switched,
            e.ServerReady: self._server_ready,
            e.BranchBegan: self._branch_began,
            e.StaticIdSeen: self._static_id,
            e.IdsDisagreed: self._ids_disagreed,
        }

    @property
    def hears(self) -> tuple[type, ...]:
        """The events that count."""
        return tuple(self._hearers)

    def hear(self, event: e.Event) -> None:
        if hearer := self._hearers.get(type(event)):
            hearer(event)

    def render(self, gauges: Gauges) -> bytes:
        """The exposition text, in the format that `CONTENT_TYPE` names."""
        self._set(gauges)
        return generate_latest(_WithoutCreated(self.registry))

    def _counter(self, name: str, text: str, **labels: Values) -> Counter:
        counter = Counter(f"kvproxy_{name}", text, tuple(labels), registry=self.registry)
        return _with_all_values(counter, labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], **labels: Values) -> Histogram:
        histogram = Histogram(f"kvproxy_{name}", text, tuple(labels), buckets=buckets, registry=self.registry)
        return _with_all_values(histogram, labels)

    def _gauge(self, name: str, text: str, **labels: Values) -> Gauge:
        return _with_all_values(Gauge(f"kvproxy_{name}", text, tuple(labels), registry=self.registry), labels)

    def _build_counters(self, endpoints: Sequence[str]) -> None:
        servers, counter = self._servers, self._counter
        self._requests = counter(
            "requests_total",
            "Requests answered, by what they were believed to find.",
            server=servers,
            endpoint=endpoints,
            outcome=Outcome,
        )
        self._failures = counter(
            "request_failures_total",
            "Requests that ended early, by who ended them.",
            server=servers,
            source=FAILURE_SOURCES,
        )
        self._prompt_tokens = counter(
            "prompt_tokens_total",
            "Prompt tokens by what the server said of them.",
            server=servers,
            source=("computed", "reused"),
        )
        self._restores = counter(
            "restores_total", "Restores looked into.", server=servers, outcome=RestoreOutcome
        )
        self._restored_bytes = counter("restored_bytes_total", "Bytes that restores read.")
        self._restored_tokens = counter("restored_tokens_total", "Tokens that restores put back.")
        self._ineffective = counter(
            "ineffective_restores_total",
            "Restores answered with success of which the next answer reused nothing.",
            server=servers,
        )
        self._checkpoints = counter(
            "checkpoints_total",
            "Checkpoints looked into.",
            server=servers,
            trigger=Trigger,
            outcome=CheckpointOutcome,
        )
        self._checkpoint_bytes = counter("checkpoint_bytes_total", "Bytes that published checkpoints wrote.")
        self._switches = counter(
            "slot_switches_total", "Times a slot went from one session to another.", server=servers
        )
        self._restarts = counter(
            "upstream_restarts_total", "New lives of the server noticed after the first.", server=servers
        )

        self._branches = counter(
            "session_branches_total",
            "Conversations that began, by what they were looked for, and why.",
            server=servers,
            source=RECOGNISED_BY,
            cause=Cause,
        )
        self._static_ids = counter(
            "static_ids_total", "Client ids that turned out to name several conversations.", server=servers
        )
        self._disputed_ids = counter(
            "disputed_ids_total", "Requests whose body names another conversation.", server=servers
        )

    def _build_histograms(self) -> None:
        histogram = self._histogram
        self._prepare = histogram(
            "prepare_seconds", "Queue, save and restore before sending.", _WORK_BUCKETS, outcome=Outcome
        )
        self._overhead = histogram(
            "overhead_seconds",
            "Our own time before sending, less queue, save and restore.",
            _OVERHEAD_BUCKETS,
        )
        self._first_byte = histogram(
            "time_to_first_byte_seconds",
            "From the request's arrival to its answer's first byte.",
            _WORK_BUCKETS,
            outcome=Outcome,
        )
        self._restore = histogram("restore_seconds", "Restores that were asked of a server.", _WORK_BUCKETS)
        self._checkpoint = histogram(
            "checkpoint_seconds", "Saves that were asked of a server.", _WORK_BUCKETS
        )
        self._lease_wait = histogram(
            "lease_wait_seconds", "Wait for a slot, also a wait of zero.", _WORK_BUCKETS
        )

    def _build_gauges(self) -> None:
        servers, gauge = self._servers, self._gauge
        self._slots = gauge("slots", "Slots by state.", server=servers, state=SlotState)
        self._dirty_slots = gauge("dirty_slots", "Slots whose session has unsaved work.", server=servers)
        self._sessions = gauge("sessions", "Sessions known.")
        self._snapshots = gauge("snapshots", "Snapshots known.", state=("valid", "invalid"))
        self._snapshot_bytes = gauge("snapshot_bytes", "Bytes of all snapshots.")
        self._breaker = gauge(
            "breaker_state", "1 for the state the breaker is in.", server=servers, state=BreakerState
        )
        self._lacks_room = gauge(
            "disk_lacks_room", "1 while nothing is saved because the disk is full.", server=servers
        )
        self._up = gauge("upstream_up", "1 if the server can take requests.", server=servers)
        self._queue = gauge("queue_depth", "Requests that wait for a slot.", server=servers)
        self._gauge("build_info", "1; the label tells the version.", version=(__version__,)).labels(
            __version__
        ).set(1)

    def _request_done(self, event: e.RequestDone) -> None:
        outcome = event.outcome
        self._requests_by[event.server, event.endpoint, outcome].inc()
        self._prepare_by[outcome,].observe(event.prepare_seconds)
        self._overhead.observe(event.overhead_seconds)
        if event.ttfb_seconds is not None:
            self._first_byte_by[outcome,].observe(event.ttfb_seconds)
        self._prompt_tokens_by[event.server, "computed"].inc(event.computed_tokens or 0)
        self._prompt_tokens_by[event.server, "reused"].inc(event.reused_tokens or 0)

    def _request_failed(self, event: e.RequestFailed) -> None:
        self._failures.labels(event.server, event.source).inc()

    def _restore_ended(self, event: e.RestoreEnded) -> None:
        self._restores.labels(event.server, event.outcome).inc()
        done = event.outcome is RestoreOutcome.RESTORED
        if done:
            self._restored_bytes.inc(event.size_bytes)
            self._restored_tokens.inc(event.tokens)
        if done or event.outcome.is_failure:
            self._restore.observe(event.duration_seconds)

    def _restore_ineffective(self, event: e.RestoreProvedIneffective) -> None:
        self._ineffective.labels(event.server).inc()

    def _checkpoint_ended(self, event: e.CheckpointEnded) -> None:
        self._checkpoints.labels(event.server, event.trigger, event.outcome).inc()
        done = event.outcome is CheckpointOutcome.PUBLISHED
        if done:
            self._checkpoint_bytes.inc(event.size_bytes)
        if done or event.outcome.is_failure:
            self._checkpoint.observe(event.duration_seconds)

    def _slot_acquired(self, event: e.SlotAcquired) -> None:
        self._lease_wait.observe(event.waited_seconds)

    def _session_switched(self, event: e.SessionSwitched) -> None:
        self._switches.labels(event.server).inc()

    def _server_ready(self, event: e.ServerReady) -> None:
        if event.restarted:
            self._restarts.labels(event.server).inc()

    def _branch_began(self, event: e.BranchBegan) -> None:
        self._branches.labels(event.server, event.source, event.cause).inc()

    def _static_id(self, event: e.StaticIdSeen) -> None:
        self._static_ids.labels(event.server).inc()

    def _ids_disagreed(self, event: e.IdsDisagreed) -> None:
        self._disputed_ids.labels(event.server).inc()

    def _set(self, gauges: Gauges) -> None:
        for server in gauges.servers:
            self._set_server(server)
        self._sessions.set(gauges.sessions)
        self._snapshots.labels("valid").set(gauges.snapshots_valid)
        self._snapshots.labels("invalid").set(gauges.snapshots_invalid)
        self._snapshot_bytes.set(gauges.snapshot_bytes)

    def _set_server(self, server: ServerGauges) -> None:
        for state in SlotState:
            self._slots.labels(server.name, state).set(server.slots.get(state, 0))
        for breaker in BreakerState:
            self._breaker.labels(server.name, breaker).set(server.breaker is breaker)
        self._dirty_slots.labels(server.name).set(server.dirty_slots)
        self._lacks_room.labels(server.name).set(server.lacks_room)
        self._up.labels(server.name).set(server.is_up)
        self._queue.labels(server.name).set(server.waiting)


class _Children(dict[tuple[str, ...], M]):
    """The children of one metric by their label values: `labels` looks up and checks them each time, which
    five times a request is more than the counting itself."""

    def __init__(self, metric: M) -> None:
        super().__init__()
        self._metric: M = metric

    def __missing__(self, values: tuple[str, ...]) -> M:
        child: M = self._metric.labels(*values)
        self[values] = child
        return child


def _with_all_values(metric: M, labels: Mapping[str, Values]) -> M:
    if labels:
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric


class _WithoutCreated(CollectorRegistry):
    """A registry's metrics less the `_created` series, which double the output and which nobody reads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._inner = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
