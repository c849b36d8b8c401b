"""Full-cycle costs of adaptive draft steps: cost_ms(Bcap, d), one table per draft depth.

See docs/design.md, Adaptive draft steps. The cycle holds draft forwards, target verification, sampling,
prefix refresh and retirement. G, the padded rows of (Bcap, d), follows from both, so `additive` needs no
theta and any grid determines it. Never loaded from a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import ConfigError
from core.spec.costs import CostModelName, CostSample, SpsCost, fit_costs


@dataclass(frozen=True, slots=True)
class BucketCost:
    """seconds = bias_d + alpha_d(Bcap) of one depth; alpha of the smallest bucket is 0."""

    bias_seconds: float
    alpha_seconds: Mapping[int, float]  # Bcap -> seconds

    def __post_init__(self) -> None:
        if not self.alpha_seconds:
            raise ConfigError("alpha_seconds is empty: at least one request bucket is needed")
        for bucket, alpha in self.alpha_seconds.items():
            seconds = self.bias_seconds + alpha
            if not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"bias + alpha({bucket}) is {seconds} seconds: it must be finite and > 0")

    def has(self, request_bucket: int, target_rows: int) -> bool:
        return request_bucket in self.alpha_seconds

    def cost_ms(self, request_bucket: int, target_rows: int) -> float:
        return 1000.0 * (self.bias_seconds + self.alpha_seconds[request_bucket])

    def to_json(self) -> dict[str, object]:
        return {
            "model": "additive",
            "bias_seconds": self.bias_seconds,
            "alpha_seconds": {str(b): s for b, s in self.alpha_seconds.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthCosts:
    """Costs of depths 0..K. A pair that was not measured has none and is no candidate."""

    tables: Mapping[int, BucketCost | SpsCost]  # depth -> table
    target_rows: Mapping[tuple[int, int], int]  # measured (Bcap, depth) -> G

    @property
    def max_depth(self) -> int:
        return max(self.tables)

    def cost_ms(self, request_bucket: int, depth: int) -> float | None:
        """Milliseconds of one cycle at `depth`, or None where this bucket was not measured at it."""
        rows = self.target_rows.get((request_bucket, depth))
        return None if rows is None else self.tables[depth].cost_ms(request_bucket, rows)

    def costs_of(self, request_bucket: int, max_depth: int) -> list[float | None]:
        """cost_ms of depths 0..max_depth."""
        return [self.cost_ms(request_bucket, depth) for depth in range(max_depth + 1)]

    def to_json(self) -> dict[str, object]:
        """What is written for reading: one table per depth. `load_costs` refuses it."""
        return {
            "algorithm": "MTP",
            "mode": "draft_step",
            "draft_width": self.max_depth,
            "depths": {str(depth): table.to_json() for depth, table in self.tables.items()},
        }


def fit_depth_costs(samples: Mapping[int, Sequence[CostSample]], model: CostModelName) -> DepthCosts:
    """Fit one table per depth from its samples; depths without samples have no table."""
    tables: dict[int, BucketCost | SpsCost] = {}
    target_rows: dict[tuple[int, int], int] = {}
    for depth, points in sorted(samples.items()):
        if not points:
            continue
        for point in points:
            if (point.request_bucket, depth) in target_rows:
                raise ConfigError(f"samples hold bucket {point.request_bucket} at depth {depth} twice")
            target_rows[point.request_bucket, depth] = point.target_rows
        if model == "sps":
            fitted = fit_costs(points, "sps").model
            assert isinstance(fitted, SpsCost)
            tables[depth] = fitted
        else:
            tables[depth] = _fit_bucket_cost(points)
    if not tables:
        raise ConfigError("no samples to fit: every probed depth is missing")
    return DepthCosts(tables=tables, target_rows=target_rows)


def _fit_bucket_cost(points: Sequence[CostSample]) -> BucketCost:
    """One point per bucket and as many parameters: the least-squares fit goes through every median."""
    medians = {p.request_bucket: float(np.median(p.seconds)) for p in points}
    bias = medians[min(medians)]
    return BucketCost(bias, {bucket: medians[bucket] - bias for bucket in sorted(medians)})
