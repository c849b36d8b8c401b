"""Turns retired steps into counts: step statistics, and the interval between retirements where it means something."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core.engine.plan import StepPlan, StepResult, StepShape
from core.engine.scheduler import Scheduler
from metrics.stats import StepStats


@dataclass(slots=True)
class IntervalClock:
    """Host time between consecutive retirements of steps with equal shape and request set, pipeline full.

    The first retirement after any change has no interval: the step behind it was still another one.
    """

    _shape: StepShape | None = None
    _rows: list[tuple[int, int]] | None = None
    _time: float = 0.0

    def observe(self, plan: StepPlan, now: float, *, pipeline_full: bool) -> float | None:
        """Seconds since the last retirement if both steps are alike, else None. `now`: a monotonic clock."""
        rows = plan.sampling_rows
        alike = pipeline_full and not plan.transient and plan.shape == self._shape and rows == self._rows
        interval = now - self._time if alike else None
        usable = pipeline_full and not plan.transient
        self._shape, self._rows, self._time = plan.shape if usable else None, rows, now
        return interval


def step_stats(result: StepResult, kept: list[int], *, width: int, scheduler: Scheduler) -> StepStats:
    """Count one retired step. kept[i]: tokens of row i that reached its request, -1 where nobody waits for them."""
    plan, choice = result.plan, result.plan.choice
    num_decode = len(plan.decode)
    emitted = result.num_emitted
    live = np.array([count >= 0 for count in kept], bool)
    taken = np.where(live, np.array(kept, np.int64), 0)
    decode = live.copy()
    decode[num_decode:] = False
    verified, accepted = result.num_verified[decode], result.num_accepted[decode]
    positions = np.arange(width)[:, None]
    stats = StepStats(
        step=plan.step,
        num_sequences=len(kept),
        prefill_tokens=sum(len(chunk.token_ids) for chunk in plan.chunks),
        request_bucket=plan.shape.request_bucket,
        target_rows=plan.shape.target_rows,
        full_width_rows=plan.shape.request_bucket * (width + 1),
        transient=plan.transient,
        decided=choice.decided,
        fallback=choice.fallback,
        speculative_sequence_steps=int((verified > 0).sum()),
        plain_sequence_steps=int(live.sum() - (verified > 0).sum()),
        proposed=int(live.sum()) * choice.propose_depth,
        verified=int(verified.sum()),
        accepted=int(accepted.sum()),
        emitted=int(taken.sum()),
        truncated=int((emitted[live] - taken[live]).sum()),
        discarded=int(emitted[~live].sum()),
        position_verified=[int(n) for n in (verified > positions).sum(1)],
        position_accepted=[int(n) for n in (accepted > positions).sum(1)],
        draft_length_counts=[int(n) for n in np.bincount(verified, minlength=width + 1)],
        accepted_length_counts=[int(n) for n in np.bincount(accepted, minlength=width + 1)],
        nan_confidences=choice.nan_confidences,
        expected_tokens=choice.expected_tokens,
        predicted_seconds=choice.predicted_seconds,
        plain_seconds=choice.plain_seconds,
    )
    stats.running, stats.waiting = len(scheduler.running), len(scheduler.waiting)
    stats.pages_used, stats.pages_free = scheduler.pages.num_used, scheduler.pages.num_free
    return stats
