from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvproxy import __version__
from kvproxy.checkpoint.outcome import CheckpointOutcome, Outcome, RestoreOutcome, Trigger
from kvproxy.identifiers import ServerName
from kvproxy.sessions.lines import Cause
from kvproxy.slots.state import SlotState
from kvproxy.telemetry.events import Event, RestoreProvedIneffective, SessionSwitched
from kvproxy.telemetry.metrics import Gauges, Metrics, ServerGauges
from kvproxy.upstream.breaker import BreakerState
from tests.unit.telemetry import samples

ENDPOINTS = ("chat/completions", "other")

PROMISED = {
    "kvproxy_requests_total": {"server", "endpoint", "outcome"},
    "kvproxy_request_failures_total": {"server", "source"},
    "kvproxy_prepare_seconds": {"outcome"},
    "kvproxy_overhead_seconds": set(),
    "kvproxy_time_to_first_byte_seconds": {"outcome"},
    "kvproxy_restores_total": {"server", "outcome"},
    "kvproxy_restore_seconds": set(),
    "kvproxy_restored_bytes_total": set(),
    "kvproxy_restored_tokens_total": set(),
    "kvproxy_ineffective_restores_total": {"server"},
    "kvproxy_checkpoints_total": {"server", "trigger", "outcome"},
    "kvproxy_checkpoint_seconds": set(),
    "kvproxy_checkpoint_bytes_total": set(),
    "kvproxy_prompt_tokens_total": {"server", "source"},
    "kvproxy_slot_switches_total": {"server"},
    "kvproxy_slots": {"server", "state"},
    "kvproxy_dirty_slots": {"server"},
    "kvproxy_sessions": set(),
    "kvproxy_snapshots": {"state"},
    "kvproxy_snapshot_bytes": set(),
    "kvproxy_breaker_state": {"server", "state"},
    "kvproxy_disk_lacks_room": {"server"},
    "kvproxy_upstream_up": {"server"},
    "kvproxy_upstream_restarts_total": {"server"},
    "kvproxy_queue_depth": {"server"},
    "kvproxy_lease_wait_seconds": set(),
    "kvproxy_build_info": {"version"},
    "kvproxy_session_branches_total": {"server", "source", "cause"},
    "kvproxy_static_ids_total": {"server"},
    "kvproxy_disputed_ids_total": {"server"},
}

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def metrics(*events: Event) -> Metrics:
    found = Metrics([samples.MAIN], ENDPOINTS)
    for event in events:
        found.hear(event)
    return found


def series(found: Metrics, gauges: Gauges | None = None) -> Series:
    text = found.render(gauges or Gauges()).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float:
    return found[f"kvproxy_{name}", frozenset(labels.items())]


def test_conversations_that_began_are_counted_by_how_and_why() -> None:
    found = series(metrics(*samples.every()))
    for cause in Cause:
        assert value(found, "session_branches_total", server="main", source="id", cause=cause) == 1
        assert value(found, "session_branches_total", server="main", source="content", cause=cause) == 0
    assert value(found, "static_ids_total", server="main") == 1
    assert value(found, "disputed_ids_total", server="main") == 1


def test_the_promised_names_carry_the_promised_labels_from_the_first_scrape() -> None:
    found: dict[str, set[str]] = {}
    for name, labels in series(metrics()):
        base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        found.setdefault(base, set()).update(label for label, _ in labels if label != "le")
    assert found == PROMISED


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("kvproxy_requests_total", "outcome", set(Outcome)),
        ("kvproxy_requests_total", "endpoint", set(ENDPOINTS)),
        ("kvproxy_prepare_seconds_count", "outcome", set(Outcome)),
        ("kvproxy_restores_total", "outcome", set(RestoreOutcome)),
        ("kvproxy_checkpoints_total", "outcome", set(CheckpointOutcome)),
        ("kvproxy_checkpoints_total", "trigger", set(Trigger)),
        ("kvproxy_request_failures_total", "source", {"client", "upstream", "proxy"}),
        ("kvproxy_prompt_tokens_total", "source", {"computed", "reused"}),
        ("kvproxy_slots", "state", set(SlotState)),
        ("kvproxy_breaker_state", "state", set(BreakerState)),
        ("kvproxy_snapshots", "state", {"valid", "invalid"}),
        ("kvproxy_upstream_up", "server", {"main"}),
    ],
)
def test_every_label_value_exists_from_the_first_scrape(name: str, label: str, values: set[str]) -> None:
    assert {dict(labels)[label] for found, labels in series(metrics()) if found == name} == values


def test_no_event_makes_a_series_that_was_not_there_before() -> None:
    assert series(metrics(*samples.every())).keys() == series(metrics()).keys()


def test_a_request_counts_once_with_its_tokens_and_times() -> None:
    found = series(metrics(samples.request(), samples.request(told=False)))
    labels = {"server": "main", "endpoint": "chat/completions", "outcome": "restored"}
    assert value(found, "requests_total", **labels) == 2
    assert value(found, "prompt_tokens_total", server="main", source="computed") == 12
    assert value(found, "prompt_tokens_total", server="main", source="reused") == 1538
    assert value(found, "prepare_seconds_count", outcome="restored") == 2
    assert value(found, "overhead_seconds_count") == 2
    assert value(found, "time_to_first_byte_seconds_count", outcome="restored") == 1


def test_a_restore_counts_its_bytes_and_tokens_only_when_they_came_back() -> None:
    found = series(metrics(*(samples.restore(outcome) for outcome in RestoreOutcome)))
    assert value(found, "restores_total", server="main", outcome="no_snapshot") == 1
    assert value(found, "restored_bytes_total") == 170_000_000
    assert value(found, "restored_tokens_total") == 1538


def test_only_what_was_asked_of_the_server_is_timed() -> None:
    restores = [samples.restore(outcome) for outcome in RestoreOutcome]
    saves = [samples.checkpoint(outcome) for outcome in CheckpointOutcome]
    found = series(metrics(*restores, *saves))
    assert value(found, "restore_seconds_count") == 1 + sum(o.is_failure for o in RestoreOutcome)
    assert value(found, "checkpoint_seconds_count") == 1 + sum(o.is_failure for o in CheckpointOutcome)


def test_a_checkpoint_counts_by_trigger_and_outcome_and_its_bytes_when_published() -> None:
    found = series(metrics(samples.checkpoint(), samples.checkpoint(CheckpointOutcome.CLEAN)))
    for outcome in ("published", "clean"):
        assert value(found, "checkpoints_total", server="main", trigger="idle", outcome=outcome) == 1
    assert value(found, "checkpoint_bytes_total") == 170_000_000


def test_switches_restarts_failures_waits_and_ineffective_restores_count() -> None:
    switched = SessionSwitched(samples.MAIN, samples.SLOT, "a", "b")
    ineffective = RestoreProvedIneffective(samples.MAIN, samples.SLOT, "a", 9, 0)
    found = series(
        metrics(
            switched,
            ineffective,
            samples.ready(),
            samples.ready(restarted=True),
            samples.failed("client"),
            samples.acquired(2.0),
        )
    )
    assert value(found, "slot_switches_total", server="main") == 1
    assert value(found, "upstream_restarts_total", server="main") == 1
    assert value(found, "ineffective_restores_total", server="main") == 1
    assert value(found, "request_failures_total", server="main", source="client") == 1
    assert (value(found, "lease_wait_seconds_count"), value(found, "lease_wait_seconds_sum")) == (1, 2.0)


def test_gauges_show_the_moment_of_the_scrape_and_forget_the_last_one() -> None:
    found = metrics()
    busy = ServerGauges(samples.MAIN, True, BreakerState.OPEN, {SlotState.SERVING: 2}, 1, 3, True)
    first = series(
        found, Gauges((busy,), sessions=5, snapshots_valid=4, snapshots_invalid=1, snapshot_bytes=9)
    )
    assert value(first, "slots", server="main", state="serving") == 2
    assert value(first, "breaker_state", server="main", state="open") == 1
    assert value(first, "breaker_state", server="main", state="closed") == 0
    assert (value(first, "upstream_up", server="main"), value(first, "queue_depth", server="main")) == (1, 3)
    assert value(first, "disk_lacks_room", server="main") == 1
    assert (value(first, "snapshots", state="invalid"), value(first, "snapshot_bytes")) == (1, 9)
    second = series(found, Gauges((ServerGauges(samples.MAIN),)))
    assert value(second, "slots", server="main", state="serving") == 0
    assert value(second, "breaker_state", server="main", state="closed") == 1
    assert value(second, "disk_lacks_room", server="main") == 0
    assert (value(second, "upstream_up", server="main"), value(second, "sessions")) == (0, 0)


def test_the_version_is_told() -> None:
    assert value(series(metrics()), "build_info", version=__version__) == 1


def test_two_sets_of_metrics_share_nothing() -> None:
    one, other = metrics(samples.request()), metrics()
    labels = {"server": "main", "endpoint": "chat/completions", "outcome": "restored"}
    assert value(series(other), "requests_total", **labels) == 0
    assert value(series(one), "requests_total", **labels) == 1


def test_each_server_has_its_own_series() -> None:
    found = series(Metrics([ServerName("a"), ServerName("b")], ENDPOINTS))
    assert value(found, "upstream_up", server="a") == value(found, "upstream_up", server="b") == 0
