from __future__ import annotations

import logging
from typing import get_args

import pytest

from kvproxy.checkpoint.outcome import CheckpointOutcome, RestoreOutcome
from kvproxy.telemetry.events import Event, ServerUnavailable
from kvproxy.telemetry.lines import line_of
from tests.unit.telemetry import samples

PROMISED = {
    "kv.backend.ready",
    "kv.backend.unavailable",
    "kv.backend.restarted",
    "kv.slot.acquire",
    "kv.slot.release",
    "kv.session.cold",
    "kv.session.switch",
    "kv.session.restore.start",
    "kv.session.restore.success",
    "kv.session.restore.failed",
    "kv.session.restore.ineffective",
    "kv.session.save.start",
    "kv.session.save.success",
    "kv.session.save.failed",
    "kv.snapshot.invalidated",
    "kv.persistence.circuit_open",
    "kv.persistence.circuit_recovered",
    "kv.request.done",
}


def test_the_samples_hold_every_kind_of_event() -> None:
    assert {type(event) for event in samples.every()} == set(get_args(Event))


def test_a_server_that_serves_and_does_not_tell_who_it_is_is_not_called_unavailable() -> None:
    codes = {
        state: line_of(ServerUnavailable(samples.MAIN, state, "why")).fields["code"]
        for state in ("unreachable", "loading", "degraded")
    }
    assert codes == {
        "unreachable": "KV_BACKEND_UNAVAILABLE",
        "loading": "KV_BACKEND_UNAVAILABLE",
        "degraded": "KV_BACKEND_UNSUPPORTED",
    }


def test_every_promised_name_is_said_of_some_event() -> None:
    assert {line_of(event).name for event in samples.every()} >= PROMISED


@pytest.mark.parametrize("event", samples.every(), ids=lambda event: type(event).__name__)
def test_no_line_carries_what_an_enum_or_an_error_would_print_as(event: Event) -> None:
    for value in line_of(event).fields.values():
        assert value is None or type(value) in (str, int, float)


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (samples.acquired(), logging.DEBUG),
        (samples.request(), logging.INFO),
        (samples.ready(), logging.INFO),
        (samples.ready(restarted=True), logging.WARNING),
        (samples.failed("client"), logging.INFO),
        (samples.failed("upstream"), logging.WARNING),
        (samples.checkpoint(), logging.INFO),
        (samples.checkpoint(CheckpointOutcome.CLEAN), logging.DEBUG),
        (samples.restore(RestoreOutcome.NO_SNAPSHOT), logging.DEBUG),
        (samples.restore(RestoreOutcome.FINGERPRINT_MISMATCH), logging.INFO),
    ],
)
def test_routine_is_quiet_and_trouble_is_not(event: Event, level: int) -> None:
    assert line_of(event).level == level


@pytest.mark.parametrize("outcome", CheckpointOutcome)
def test_every_failed_save_warns_with_a_code(outcome: CheckpointOutcome) -> None:
    line = line_of(samples.checkpoint(outcome))
    failed = line.name == "kv.session.save.failed"
    assert failed == outcome.is_failure
    assert not failed or (line.level == logging.WARNING and str(line.fields["code"]).startswith("KV_"))


@pytest.mark.parametrize("outcome", RestoreOutcome)
def test_every_failed_restore_warns_with_a_code(outcome: RestoreOutcome) -> None:
    line = line_of(samples.restore(outcome))
    failed = line.name == "kv.session.restore.failed"
    assert failed == outcome.is_failure
    assert not failed or (line.level == logging.WARNING and str(line.fields["code"]).startswith("KV_"))


def test_a_save_says_who_where_how_much_and_how_long() -> None:
    assert dict(line_of(samples.checkpoint()).fields) == {
        "session": "0123456789ab",
        "server": "main",
        "slot": 1,
        "trigger": "idle",
        "tokens": 1538,
        "bytes": 170_000_000,
        "duration_ms": 250.2,
        "detail": None,
    }


def test_a_request_says_what_was_computed_and_what_was_reused() -> None:
    fields = line_of(samples.request()).fields
    assert (fields["outcome"], fields["computed"], fields["reused"], fields["generated"]) == (
        "restored",
        12,
        1538,
        7,
    )
    assert (fields["ttfb_ms"], fields["overhead_ms"]) == (500.0, 0.4)
