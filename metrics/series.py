"""Counters, gauges and histograms as plain numbers, exported through prometheus_client's collector interface.

Why not prometheus_client's own classes: one verify step yields several tokens, so histograms need a weight;
every series must exist at zero; and a negative increment must be recorded, not raised while serving.
Not thread-safe: all calls come from one event loop.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from metrics.families import BASE_LABELS, FAMILIES, Family, Label, Limits

_logger = logging.getLogger(__name__)

ANOMALY_COUNTER = "xspec_metrics_anomalies_total"


class Histogram:
    """Observations by bucket; counts are per bucket and become cumulative only when exported."""

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(map(float, edges))
        self.counts = [0] * (len(self.edges) + 1)
        self.total = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += weight
        self.total += value * weight

    def cumulative(self) -> list[tuple[str, float]]:
        names = [*map(str, self.edges), "+Inf"]
        return list(zip(names, map(float, itertools.accumulate(self.counts)), strict=True))


class SeriesStore(Collector):
    """The values of every family, all series present from the start.

    `combinations` lists the label tuples of families whose labels do not combine freely.
    """

    def __init__(
        self,
        *,
        model_name: str,
        engine: str,
        limits: Limits,
        buckets: Mapping[str, Sequence[float]],
        combinations: Mapping[str, Sequence[tuple[str, ...]]],
    ) -> None:
        self.base_values = (model_name, engine)
        self._reported: set[tuple[str, str]] = set()
        self.scalars: dict[str, dict[tuple[str, ...], float]] = {}
        self.histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}
        _check_buckets(buckets)
        for family in FAMILIES.values():
            keys = combinations.get(family.name)
            if keys is None:
                keys = list(itertools.product(*(_values(label, limits) for label in family.labels)))
            if family.buckets is None:
                self.scalars[family.name] = dict.fromkeys(keys, 0.0)
            else:
                edges = buckets.get(family.name) or family.buckets.edges(limits)
                self.histograms[family.name] = {key: Histogram(edges) for key in keys}

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Increase a counter. A negative or undefined amount is an anomaly, never an exception."""
        if amount == 0:
            return
        cells = self.scalars[name]
        key = self._key(name, cells, labels)
        if key is None:
            return
        if amount > 0:
            cells[key] += amount
        else:
            self.anomaly("negative", name, f"increment {amount!r}")

    def set(self, name: str, value: float, *labels: str) -> None:
        cells = self.scalars[name]
        key = self._key(name, cells, labels)
        if key is not None:
            cells[key] = float(value)

    def set_only(self, name: str, *labels: str) -> None:
        """Make one series 1 and its siblings 0: the state that holds now."""
        cells = self.scalars[name]
        key = self._key(name, cells, labels)
        if key is not None:
            for other in cells:
                cells[other] = 1.0 if other == key else 0.0

    def replace_info(self, name: str, labels: tuple[str, ...]) -> None:
        """Give an info family its one series."""
        self.scalars[name] = {labels: 1.0}

    def observe(self, name: str, value: float, *labels: str, weight: int = 1) -> None:
        """Record `weight` equal observations; a negative or undefined value is an anomaly."""
        if weight == 0:
            return
        cells = self.histograms[name]
        key = self._key(name, cells, labels)
        if key is None:
            return
        if value >= 0 and weight > 0:
            cells[key].observe(value, weight)
        else:
            self.anomaly("negative", name, f"observation {value!r} with weight {weight!r}")

    def anomaly(self, kind: str, name: str, detail: str) -> None:
        """Count a value that must not exist; log the first of its kind for each metric."""
        self.scalars[ANOMALY_COUNTER][(kind,)] += 1
        if (kind, name) not in self._reported:
            self._reported.add((kind, name))
            _logger.warning(
                "metrics.anomaly kind=%s metric=%s: %s (further ones are only counted)", kind, name, detail
            )

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES.values():
            yield self._export(family)

    def _key(
        self, name: str, cells: Mapping[tuple[str, ...], object], labels: tuple[str, ...]
    ) -> tuple[str, ...] | None:
        if labels in cells:
            return labels
        # Unknown values never become series: clients could make them grow without end.
        if ("other",) in cells and len(labels) == 1:
            return ("other",)
        self.anomaly("unknown_label", name, f"labels {labels!r}")
        return None

    def _export(self, family: Family) -> Metric:
        names = (*BASE_LABELS, *(label.name for label in family.labels))
        if family.kind == "histogram":
            histogram = HistogramMetricFamily(family.name, family.help, labels=names)
            for key, cell in self.histograms[family.name].items():
                histogram.add_metric((*self.base_values, *key), cell.cumulative(), cell.total)
            return histogram
        exporter = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        scalar = exporter(family.name, family.help, labels=names)
        for key, value in self.scalars[family.name].items():
            scalar.add_metric((*self.base_values, *key), value)
        return scalar


def _values(label: Label, limits: Limits) -> tuple[str, ...]:
    if label.values is not None:
        return label.values
    match label.name:
        case "method":
            return (limits.method,)
        case "position":
            return tuple(map(str, range(limits.max_draft_tokens)))
        case "rank":
            return tuple(map(str, range(limits.world_size)))
        case _:
            return ("",)  # the one series of an info family, until it is set


def _check_buckets(buckets: Mapping[str, Sequence[float]]) -> None:
    for name, edges in buckets.items():
        family = FAMILIES.get(name)
        if family is None or family.buckets is None:
            raise ValueError(f"histogram buckets for {name}: no histogram has this name")
        if not edges or any(b <= a for a, b in itertools.pairwise(edges)):
            raise ValueError(
                f"histogram buckets for {name}: {list(edges)} must rise strictly; give at least one"
            )
