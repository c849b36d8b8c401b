"""Read a /metrics text back into numbers: sums over labels, and quantiles from bucket differences.

Knows nothing of HTTP: give it the text. Quantiles are interpolated as PromQL's histogram_quantile does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

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

    def minus(self, earlier: Snapshot) -> Snapshot:
        """What happened in between. Series that went down (a restart) count from zero."""
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
