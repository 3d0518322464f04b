from __future__ import annotations

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvproxy.checkpoint.outcome import Outcome
from kvproxy.telemetry.histogram import Histogram

BOUNDS = (0.005, 0.25, 1.0, 300.0)


def scraped(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_a_scrape_reads_what_the_librarys_own_would_have_said() -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    histogram = Histogram("wait_seconds", "A wait.", BOUNDS, {"outcome": Outcome}, ours)
    model = prometheus_client.Histogram(
        "wait_seconds", "A wait.", ("outcome",), buckets=BOUNDS, registry=theirs
    )
    for outcome in Outcome:
        model.labels(outcome)
    assert scraped(ours) == scraped(theirs), "before anything was observed"
    dice = random.Random(7)
    for amount in (0.0, *BOUNDS, 301.0, *(dice.expovariate(1.0) for _ in range(200))):
        outcome = dice.choice(list(Outcome))
        histogram.observe(amount, outcome)
        model.labels(outcome).observe(amount)
    assert scraped(ours) == scraped(theirs)


def test_without_labels_there_is_one_series() -> None:
    registry = CollectorRegistry(auto_describe=True)
    histogram = Histogram("wait_seconds", "A wait.", BOUNDS, {}, registry)
    histogram.observe(0.25)
    assert 'wait_seconds_bucket{le="0.25"} 1.0' in scraped(registry)
    assert 'wait_seconds_bucket{le="0.005"} 0.0' in scraped(registry)
    assert "wait_seconds_sum 0.25" in scraped(registry)


def test_a_value_that_no_label_has_is_no_new_series() -> None:
    histogram = Histogram("wait_seconds", "A wait.", BOUNDS, {"outcome": ("a",)}, CollectorRegistry())
    with pytest.raises(KeyError):
        histogram.observe(1.0, "b")
