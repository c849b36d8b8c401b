"""Startup calibration without its engine: which points are probed, and what counts as a sample.

See docs/design.md, Startup calibration. A sample is the interval between consecutive retirements of like
steps while the pipeline is full. Per point: warm-up steps are dropped, then windows of consecutive intervals;
one window gives one value, the mean of its steps, and the cost of a point is the median of its windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from core.config import CalibrationConfig, ContextConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePoint:
    context: ContextConfig
    request_bucket: int
    target_rows: int


def probe_points(config: CalibrationConfig) -> Iterator[ProbePoint]:
    """Every (context, bucket, tier), ascending, so that cheap points come first."""
    for context in config.contexts:
        for bucket in config.request_buckets:
            for rows in config.target_graph_rows[bucket]:
                yield ProbePoint(context=context, request_bucket=bucket, target_rows=rows)


def steps_per_point(config: CalibrationConfig, *, lag: int) -> int:
    """Decode steps that a point launches at most: one without an interval, warm-up, windows, and those in flight."""
    return 1 + config.warmup_steps + config.windows_per_point * config.window_steps + lag


def estimate_seconds(
    config: CalibrationConfig,
    step_seconds: Mapping[tuple[int, int], float],
    *,
    prompt_row_seconds: float,
    lag: int,
) -> float:
    """About how long probing takes. step_seconds: one step of (request bucket, target rows), as warmed up.

    Each context computes the prefixes of its largest bucket once; every point then runs its steps.
    """
    prompts = sum(context.prefill_tokens for context in config.contexts) * max(config.request_buckets)
    steps = steps_per_point(config, lag=lag)
    decode = sum(step_seconds.get((p.request_bucket, p.target_rows), 0.0) for p in probe_points(config))
    return prompts * prompt_row_seconds + steps * decode


@dataclass(slots=True, kw_only=True)
class WindowSampler:
    """Collects one point's windows from the steps as they retire."""

    warmup_steps: int
    window_steps: int
    windows_per_point: int
    windows: list[float] = field(default_factory=list)
    _skipped: int = 0
    _current: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.windows) >= self.windows_per_point

    def add(self, interval_seconds: float | None) -> None:
        """Take the interval of one retired step; None (the step before was another one) starts the window anew."""
        if interval_seconds is None:
            self._current.clear()
        elif self._skipped < self.warmup_steps:
            self._skipped += 1
        elif not self.done:
            self._current.append(interval_seconds)
            if len(self._current) == self.window_steps:
                self.windows.append(sum(self._current) / self.window_steps)
                self._current.clear()
