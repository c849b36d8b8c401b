"""Read a /metrics text back into numbers: sums over labels, and quantiles from bucket differences.

Knows nothing of HTTP: give it the text. Quantiles are interpolated as PromQL's histogram_quantile does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PROCESS_START = "process_start_time_seconds"
_Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All samples of one scrape, by sample name and labels."""

    samples: dict[_Key, float]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def sum(self, name: str, **labels: str) -> float:
        """Sum the samples of this name that carry all given labels; 0 if there are none."""
        wanted = labels.items()
        return math.fsum(value for (n, key), value in self.samples.items() if n == name and wanted <= key)

    def values(self, name: str, label: str) -> dict[str, float]:
        """The samples of this name by the value of one label, summed over all others."""
        found: dict[str, float] = {}
        for (sample, key), value in self.samples.items():
            if sample == name and (value_of_label := dict(key).get(label)) is not None:
                found[value_of_label] = found.get(value_of_label, 0.0) + value
        return found

    def info(self, name: str) -> dict[str, str]:
        """The labels of an info metric, or of the one series of a state that is 1; empty without one."""
        return next((dict(key) for (n, key), value in self.samples.items() if n == name and value == 1), {})

    def is_restart_of(self, earlier: Snapshot) -> bool:
        """Whether another process answered: its counters begin at zero."""
        return self.sum(PROCESS_START) != earlier.sum(PROCESS_START)

    def minus(self, earlier: Snapshot) -> Snapshot:
        """What happened in between; after a restart everything counts from zero, as do series that went down."""
        if self.is_restart_of(earlier):
            return self
        return Snapshot(
            {key: _increase(value, earlier.samples.get(key, 0.0)) for key, value in self.samples.items()}
        )

    def quantile(self, q: float, histogram: str, **labels: str) -> float | None:
        """Estimate a quantile of a histogram's observations; None without any."""
        buckets: dict[float, float] = {}
        wanted = labels.items()
        for (name, key), value in self.samples.items():
            if name == f"{histogram}_bucket" and wanted <= key:
                edge = float(dict(key)["le"])
                buckets[edge] = buckets.get(edge, 0.0) + value
        edges = sorted(buckets)
        if not edges or buckets[edges[-1]] <= 0:
            return None
        rank = q * buckets[edges[-1]]
        index = next(i for i, edge in enumerate(edges) if buckets[edge] >= rank)
        lower, below = (edges[index - 1], buckets[edges[index - 1]]) if index else (0.0, 0.0)
        if math.isinf(edges[index]):
            return lower  # beyond the last bound: that bound is all that is known
        inside = buckets[edges[index]] - below
        return lower if inside <= 0 else lower + (edges[index] - lower) * (rank - below) / inside


def _increase(now: float, before: float) -> float:
    return now - before if now >= before else now
