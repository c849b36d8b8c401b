"""Runs calibration's probe points through the real pipeline: real prefill, real asynchronous steps, real retirement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from core.config import CalibrationConfig
from core.engine.loop import EngineLoop
from core.errors import CalibrationError
from core.spec.budgets import ForcedRows, Tiers
from core.spec.calibration import ProbePoint, WindowSampler, probe_points, steps_per_point
from core.spec.costs import CostSample
from core.types import Request, SamplingParams

logger = structlog.get_logger()
FIRST_PROBE_ID = -1  # synthetic requests count down from here; served ones are positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedPoint:
    """`sample` is None when the engine did not execute what was asked for: a point is missing, never copied."""

    point: ProbePoint
    sample: CostSample | None


class Prober:
    """Measures one engine. The engine must be idle, and is left idle and as new."""

    def __init__(self, loop: EngineLoop, config: CalibrationConfig, *, tiers: Tiers, vocab_size: int) -> None:
        self._loop = loop
        self._config = config
        self._tiers = tiers
        self._vocab_size = vocab_size
        self._next_id = FIRST_PROBE_ID

    def run(self, report: Callable[[int, int], None]) -> list[ProbedPoint]:
        """Probe every point; report(done, total) after each."""
        loop = self._loop
        served = loop.speculator.budget
        points = list(probe_points(self._config))
        probed = []
        loop.scheduler.prefill_first = True
        try:
            for done, point in enumerate(points, 1):
                loop.speculator.budget = ForcedRows(
                    self._tiers, draft_width=loop.speculator.width, pick=lambda *_, p=point: p.target_rows
                )
                probed.append(self._probe(point))
                report(done, len(points))
        finally:
            loop.speculator.budget = served
            loop.scheduler.prefill_first = False
        loop.restart_counters()
        return probed

    def _probe(self, point: ProbePoint) -> ProbedPoint:
        loop, config = self._loop, self._config
        requests = self._requests(point)
        for request in requests:
            if refusal := loop.scheduler.refusal(request):
                raise CalibrationError(
                    f"calibration of request bucket {point.request_bucket} with prefill "
                    f"{point.context.prefill_tokens} does not fit: {refusal}; give a smaller configuration with "
                    "--adaptive_target_verify_calibration, or more KV memory"
                )
            loop.scheduler.add(request)
        sampler = WindowSampler(
            warmup_steps=config.warmup_steps,
            window_steps=config.window_steps,
            windows_per_point=config.windows_per_point,
        )
        faithful = True
        while not sampler.done and loop.has_work:
            outcome = loop.step()
            if outcome is None or outcome.result.plan.transient:
                continue
            shape = outcome.result.plan.shape
            if len(outcome.result.plan.decode) == point.request_bucket:
                faithful &= shape.request_bucket == point.request_bucket
                faithful &= outcome.result.executed_rows == point.target_rows
                sampler.add(outcome.interval_seconds)
        for request in requests:
            loop.scheduler.abort(request.request_id)
        loop.drain()
        loop.scheduler.check_idle()
        if not (faithful and sampler.done):
            logger.warning(
                "calibration.point_missing",
                request_bucket=point.request_bucket,
                target_rows=point.target_rows,
                windows=len(sampler.windows),
            )
            return ProbedPoint(point=point, sample=None)
        return ProbedPoint(
            point=point,
            sample=CostSample(
                request_bucket=point.request_bucket,
                target_rows=point.target_rows,
                seconds=tuple(sampler.windows),
            ),
        )

    def _requests(self, point: ProbePoint) -> Sequence[Request]:
        """Synthetic prompts, the same for every point: random ids, so that nothing is special about them."""
        tokens = steps_per_point(self._config, lag=self._loop.lag) * (self._loop.speculator.width + 1)
        ids = np.random.default_rng(self._config.token_seed).integers(
            0, self._vocab_size, (point.request_bucket, point.context.prefill_tokens)
        )
        requests = []
        for row in ids:
            requests.append(
                Request(
                    request_id=self._next_id,
                    prompt_token_ids=tuple(int(i) for i in row),
                    params=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
                )
            )
            self._next_id -= 1
        return requests
