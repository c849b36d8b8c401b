"""Step costs: what one full decode step costs per request bucket Bcap and per physical verify rows G.

Full-step costs: draft, verification, sampling and commit are inside, nothing is added later (docs/design.md,
Adaptive target verification). Knows no device, no pipeline and no file; `cost_table` stores what is fitted
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np
from scipy.linalg import lstsq
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from core.errors import ConfigError
from core.spec.json_reader import JsonNode

CostModelName = Literal["additive", "sps"]
MODELS: tuple[CostModelName, ...] = ("additive", "sps")
FALL_TOLERANCE = 0.05  # relative fall of cost with more rows that is noise of the measurement
FLAT_TOLERANCE = (
    0.01  # relative rise of cost from the smallest to full width below which a choice cannot matter
)


class CostModel(Protocol):
    """Answers cost_ms(Bcap, G). Ask `has` first: `cost_ms` of an uncovered pair is our own bug."""

    def has(self, request_bucket: int, target_rows: int) -> bool: ...

    def cost_ms(self, request_bucket: int, target_rows: int) -> float: ...

    def to_json(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class SpsCost:
    """Steps per second per G, whatever the bucket: cost = 1000 / SPS(G) (the paper's SPS table)."""

    steps_per_second: Mapping[int, float]  # G -> full steps per second

    def __post_init__(self) -> None:
        _set_sorted(self, "steps_per_second")
        for rows, rate in self.steps_per_second.items():
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(
                    f"steps_per_second of {rows} rows is {rate}: every rate must be finite and > 0"
                )

    def has(self, request_bucket: int, target_rows: int) -> bool:
        return target_rows in self.steps_per_second

    def cost_ms(self, request_bucket: int, target_rows: int) -> float:
        return 1000.0 / self.steps_per_second[target_rows]

    def to_json(self) -> dict[str, object]:
        return {"model": "sps", "steps_per_second": {str(g): r for g, r in self.steps_per_second.items()}}


@dataclass(frozen=True, slots=True)
class AdditiveCost:
    """step seconds = bias + alpha(Bcap) + theta(G)."""

    bias_seconds: float
    alpha_seconds: Mapping[int, float]  # Bcap -> seconds; the smallest bucket's is 0 in a fit
    theta_seconds: Mapping[int, float]  # G -> seconds; the smallest G's is 0 in a fit

    def __post_init__(self) -> None:
        _set_sorted(self, "alpha_seconds")
        _set_sorted(self, "theta_seconds")
        if not (math.isfinite(self.bias_seconds) and self.bias_seconds > 0):
            raise ConfigError(f"bias_seconds is {self.bias_seconds}: it must be finite and > 0")
        for name in ("alpha_seconds", "theta_seconds"):
            for key, seconds in getattr(self, name).items():
                if not math.isfinite(seconds):
                    raise ConfigError(f"{name} of {key} is {seconds}: every entry must be finite")

    def has(self, request_bucket: int, target_rows: int) -> bool:
        # A pair that was never probed (64 sequences, one row) may come out below zero: that is no cost.
        covered = request_bucket in self.alpha_seconds and target_rows in self.theta_seconds
        return covered and self._seconds(request_bucket, target_rows) > 0

    def cost_ms(self, request_bucket: int, target_rows: int) -> float:
        return 1000.0 * self._seconds(request_bucket, target_rows)

    def to_json(self) -> dict[str, object]:
        return {
            "model": "additive",
            "bias_seconds": self.bias_seconds,
            "alpha_seconds": {str(b): s for b, s in self.alpha_seconds.items()},
            "theta_seconds": {str(g): s for g, s in self.theta_seconds.items()},
        }

    def _seconds(self, bucket: int, rows: int) -> float:
        return self.bias_seconds + self.alpha_seconds[bucket] + self.theta_seconds[rows]


def cost_model_from_json(node: JsonNode, *, extra: Iterable[str] = ()) -> SpsCost | AdditiveCost:
    """Read a cost table (docs/design.md, Startup calibration); the caller reads keys named by `extra`."""
    members = node.value if isinstance(node.value, dict) else {}
    if "model" not in members:
        node.refuse('must be a cost table: an object with "model": "additive" or "sps"')
    name = JsonNode(members["model"], node.source, f"{node.path}.model").string(MODELS)
    try:
        if name == "sps":
            fields = node.fields(required=("model", "steps_per_second"), optional=extra)
            rates = {g: n.number() for g, n in fields["steps_per_second"].int_keys().items()}
            return SpsCost(rates)
        fields = node.fields(
            required=("model", "bias_seconds", "alpha_seconds", "theta_seconds"), optional=extra
        )
        return AdditiveCost(
            fields["bias_seconds"].number(),
            {b: n.number() for b, n in fields["alpha_seconds"].int_keys().items()},
            {g: n.number() for g, n in fields["theta_seconds"].int_keys().items()},
        )
    except ConfigError as error:
        if str(error).startswith(node.source):
            raise
        raise ConfigError(f"{node.source}: {node.path}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSample:
    """One probed point: each entry of `seconds` is the mean step interval of one window."""

    request_bucket: int
    target_rows: int
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds or not all(math.isfinite(s) and s > 0 for s in self.seconds):
            raise ConfigError(
                f"sample of bucket {self.request_bucket}, {self.target_rows} rows has seconds "
                f"{list(self.seconds)}: at least one window is needed and each must be finite and > 0"
            )

    @property
    def median_seconds(self) -> float:
        """A point's cost: the median of its windows."""
        return float(np.median(self.seconds))

    def to_json(self) -> dict[str, object]:
        return {
            "request_bucket": self.request_bucket,
            "target_rows": self.target_rows,
            "seconds": list(self.seconds),
        }


def sample_from_json(node: JsonNode) -> CostSample:
    """Read one entry of a `samples` list."""
    fields = node.fields(required=("request_bucket", "target_rows", "seconds"))
    return CostSample(
        request_bucket=fields["request_bucket"].integer(at_least=1),
        target_rows=fields["target_rows"].integer(at_least=1),
        seconds=tuple(n.number(above=0) for n in fields["seconds"].items(at_least=1)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """A fitted model and how far it is from what was measured (relative to the measured medians)."""

    model: SpsCost | AdditiveCost
    predicted_ms: tuple[float, ...]  # in sample order
    max_relative_error: float
    mean_relative_error: float


def fit_costs(samples: Sequence[CostSample], model: CostModelName) -> CostFit:
    """Fit `model` to the window medians of `samples`; ConfigError if the data cannot determine it.

    additive: ordinary least squares, unweighted. sps: per G the median over buckets of the points' medians.
    """
    if not samples:
        raise ConfigError("no samples to fit: every probed point is missing")
    points = [(s.request_bucket, s.target_rows) for s in samples]
    repeated = next((p for i, p in enumerate(points) if p in points[:i]), None)
    if repeated is not None:
        raise ConfigError(
            f"samples hold bucket {repeated[0]} with {repeated[1]} rows twice: put all windows of a point "
            "in one entry"
        )
    measured = np.array([s.median_seconds for s in samples])
    fitted = _fit_sps(points, measured) if model == "sps" else _fit_additive(points, measured)
    predicted = np.array([fitted.cost_ms(b, g) for b, g in points])
    impossible = next((p for p in points if not fitted.has(*p)), None)
    if impossible is not None:
        raise ConfigError(
            f"the fit gives bucket {impossible[0]} with {impossible[1]} rows no positive cost "
            "although it was measured: the samples are too noisy; measure longer windows or use model sps"
        )
    errors = np.abs(predicted / 1000.0 - measured) / measured
    return CostFit(
        model=fitted,
        predicted_ms=tuple(predicted.tolist()),
        max_relative_error=float(errors.max()),
        mean_relative_error=float(errors.mean()),
    )


def _fit_sps(points: Sequence[tuple[int, int]], measured: np.ndarray) -> SpsCost:
    by_rows: dict[int, list[float]] = {}
    for (_, rows), seconds in zip(points, measured.tolist(), strict=True):
        by_rows.setdefault(rows, []).append(seconds)
    return SpsCost({rows: 1.0 / float(np.median(seconds)) for rows, seconds in by_rows.items()})


def _fit_additive(points: Sequence[tuple[int, int]], measured: np.ndarray) -> AdditiveCost:
    problem = check_connected(_grid_of(points))
    if problem is not None:
        raise ConfigError(problem)
    buckets = sorted({b for b, _ in points})
    rows = sorted({g for _, g in points})
    design = np.zeros((len(points), len(buckets) + len(rows) - 1))  # columns: bias, alpha[1:], theta[1:]
    design[:, 0] = 1.0
    for i, (bucket, target_rows) in enumerate(points):
        b, g = buckets.index(bucket), rows.index(target_rows)
        if b:
            design[i, b] = 1.0
        if g:
            design[i, len(buckets) - 1 + g] = 1.0
    solution = lstsq(design, measured)[0].tolist()
    alpha = [0.0, *solution[1 : len(buckets)]]
    theta = [0.0, *solution[len(buckets) :]]
    return AdditiveCost(
        solution[0], dict(zip(buckets, alpha, strict=True)), dict(zip(rows, theta, strict=True))
    )


def check_connected(grid: Mapping[int, Iterable[int]]) -> str | None:
    """Say why alpha and theta cannot be separated on a probe grid (bucket -> its G values); None if they can.

    Buckets and G values are the two sides of a graph, probed points its edges: with two components a constant
    can move from alpha to theta of one of them unseen. A pure check, so that `resolve` can refuse before
    anything runs.
    """
    buckets = sorted(grid)
    rows = sorted({g for gs in grid.values() for g in gs})
    if not rows:
        return "the probe grid is empty: name at least one request bucket with one row count"
    edges = [(b, len(buckets) + rows.index(g)) for b, bucket in enumerate(buckets) for g in grid[bucket]]
    size = len(buckets) + len(rows)
    matrix = coo_array((np.ones(len(edges)), tuple(np.array(edges).T)), shape=(size, size))
    count, labels = connected_components(matrix, directed=False)
    if count == 1:
        return None
    groups = [[b for b, label in zip(buckets, labels, strict=False) if label == c] for c in range(count)]
    shown = " and ".join(str(group) for group in groups)
    return (
        f"the probe grid is not connected: request buckets {shown} share no row count, so an additive cost "
        "model is undetermined; add buckets or target_graph_rows in between, or use model sps"
    )


def is_flat(costs: CostModel, request_bucket: int, tiers: Iterable[int]) -> bool:
    """Whether verifying more rows costs (almost) nothing for this bucket, so that full width always wins."""
    known = [costs.cost_ms(request_bucket, g) for g in sorted(tiers) if costs.has(request_bucket, g)]
    return len(known) > 1 and max(known) <= min(known) * (1.0 + FLAT_TOLERANCE)


def shape_report(costs: CostModel, grid: Mapping[int, Iterable[int]]) -> list[str]:
    """Say per bucket of `grid` (bucket -> tiers) what an operator should know: flat or falling costs."""
    lines = []
    for bucket in sorted(grid):
        tiers = [g for g in sorted(grid[bucket]) if costs.has(bucket, g)]
        if is_flat(costs, bucket, tiers):
            lines.append(
                f"step costs of request bucket {bucket} are flat over {tiers} rows "
                f"(within {FLAT_TOLERANCE:.0%}): full width always wins there and adaptive verification "
                "cannot act"
            )
            continue
        for small, large in pairwise(tiers):
            a, b = costs.cost_ms(bucket, small), costs.cost_ms(bucket, large)
            if b < a * (1.0 - FALL_TOLERANCE):
                lines.append(
                    f"step costs of request bucket {bucket} fall from {a:.3f} ms at {small} rows to "
                    f"{b:.3f} ms at {large} rows: a budget of {small} will never be chosen"
                )
    return lines


def _grid_of(points: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    grid: dict[int, list[int]] = {}
    for bucket, rows in points:
        grid.setdefault(bucket, []).append(rows)
    return grid


def _set_sorted(model: SpsCost | AdditiveCost, name: str) -> None:
    """Replace a mapping field by its own sorted copy with plain ints and floats."""
    table: Mapping[int, float] = getattr(model, name)
    if not table:
        raise ConfigError(f"{name} is empty: at least one entry is needed")
    if any(key < 1 for key in table):
        raise ConfigError(f"{name} has the key {min(table)}: bucket and row counts start at 1")
    object.__setattr__(model, name, {int(k): float(table[k]) for k in sorted(table)})
