"""Runs calibration's probe points through the real pipeline: real prefill, real asynchronous steps, real retirement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby

import numpy as np

from core.config import CalibrationConfig, ContextConfig
from core.engine.loop import EngineLoop
from core.errors import CalibrationError
from core.logs import get_logger
from core.spec.budgets import ForcedRows, Tiers
from core.spec.calibration import ProbePoint, WindowSampler, probe_points, steps_per_point
from core.spec.costs import CostSample
from core.types import Request, SamplingParams

logger = get_logger("xspec.engine")
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

    def run(self, report: Callable[[int, int], None]) -> list[ProbedPoint]:
        """Probe every point; report(done, total) counts samples, since the last points take longest."""
        loop = self._loop
        served = loop.speculator.budget
        points = list(probe_points(self._config))
        probed: list[ProbedPoint] = []
        samples = count(1)
        total = len(points) * (
            self._config.warmup_steps + self._config.windows_per_point * self._config.window_steps
        )

        def progress() -> None:
            report(min(next(samples), total), total)

        loop.scheduler.prefill_first = True
        try:
            for context, of_context in groupby(points, key=lambda point: point.context):
                requests = self._requests(context)
                running: list[Request] = []
                for point in of_context:
                    self._restart(running)
                    while len(running) < point.request_bucket:
                        running.append(next(requests))
                        self._add(running[-1], point)
                    probed.append(self._probe(point, progress))
                for request in running:
                    loop.scheduler.abort(request.request_id)
                loop.scheduler.check_idle()
        finally:
            loop.speculator.budget = served
            loop.scheduler.prefill_first = False
        loop.restart_counters()
        return probed

    def _restart(self, running: Sequence[Request]) -> None:
        """Every point starts from the same prefixes; what is there of them need not be computed again."""
        for request in running:
            self._loop.scheduler.restart(request.request_id)

    def _add(self, request: Request, point: ProbePoint) -> None:
        if refusal := self._loop.scheduler.refusal(request):
            raise CalibrationError(
                f"calibration of request bucket {point.request_bucket} with prefill "
                f"{point.context.prefill_tokens} does not fit: {refusal}; give a smaller configuration with "
                "--adaptive_target_verify_calibration, or more KV memory"
            )
        self._loop.scheduler.add(request)

    def _probe(self, point: ProbePoint, progress: Callable[[], None]) -> ProbedPoint:
        loop, config = self._loop, self._config
        loop.speculator.budget = ForcedRows(
            self._tiers, draft_width=loop.speculator.width, pick=lambda *_: point.target_rows
        )
        sampler = WindowSampler(
            warmup_steps=config.warmup_steps,
            window_steps=config.window_steps,
            windows_per_point=config.windows_per_point,
        )
        faithful = True
        for _ in range(self._most_steps(point)):
            if sampler.done:
                break
            outcome = loop.step()
            if outcome is None or outcome.result.plan.transient:
                continue
            shape = outcome.result.plan.shape
            faithful &= len(outcome.result.plan.decode) == shape.request_bucket == point.request_bucket
            faithful &= outcome.result.executed_rows == point.target_rows
            sampler.add(outcome.interval_seconds)
            if outcome.interval_seconds is not None:
                progress()
        loop.drain()
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

    def _most_steps(self, point: ProbePoint) -> int:
        """More loop turns than a point can need: its prompts one token a step, then its decode steps."""
        prefill = point.request_bucket * point.context.prefill_tokens
        return prefill + steps_per_point(self._config, lag=self._loop.lag)

    def _requests(self, context: ContextConfig) -> Iterator[Request]:
        """Synthetic prompts, the same at every start: random ids, so that nothing is special about them."""
        tokens = steps_per_point(self._config, lag=self._loop.lag) * (self._loop.speculator.width + 1)
        source = np.random.default_rng(self._config.token_seed)
        for request_id in count(FIRST_PROBE_ID, -1):
            ids = source.integers(0, self._vocab_size, context.prefill_tokens)
            yield Request(
                request_id=request_id,
                prompt_token_ids=tuple(int(i) for i in ids),
                params=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
            )
