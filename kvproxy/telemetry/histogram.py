"""A histogram that one thread observes.

The library's own puts each observation through checks and locks that are for threads, and a request has four:
that takes five times as long as the counting itself. A scrape reads the same of either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Histogram(Collector):
    """`bounds` are the upper ends of its buckets, each of which holds what is equal to its own; one more lies
    beyond the last. `labels` gives the values of each: all there are, and all there from the first scrape."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        labels: Mapping[str, Iterable[str]],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(bounds)
        self._ends = (*map(repr, map(float, bounds)), "+Inf")
        self._counts = {values: [0] * len(self._ends) for values in product(*labels.values())}
        self._sums = dict.fromkeys(self._counts, 0.0)
        registry.register(self)

    def observe(self, amount: float, *values: str) -> None:
        """`values` are those of the labels, in their order."""
        self._counts[values][bisect_left(self._bounds, amount)] += 1
        self._sums[values] += amount

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, counts in self._counts.items():
            buckets = list(zip(self._ends, accumulate(counts), strict=True))
            family.add_metric(values, buckets, self._sums[values])
        yield family
