"""The one loop: plan, launch, retire. The lag between launch and retirement is the length of one deque.

lag 2 is asynchronous scheduling (the host plans step n while n - 1 runs), lag 1 is synchronous; there is no second
code path. Results of step n - lag are applied before step n is planned.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from core.engine.accounting import IntervalClock, step_stats
from core.engine.feedback import InFlight
from core.engine.plan import StepResult
from core.engine.scheduler import Scheduler
from core.engine.worker import Worker
from core.spec.speculator import Speculator
from core.types import RequestOutput
from metrics.stats import StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One retired step: what clients get, what metrics get, and the raw result."""

    outputs: list[RequestOutput]
    stats: StepStats
    result: StepResult
    interval_seconds: float | None  # see IntervalClock


@dataclass(slots=True)
class EngineLoop:
    """Drives scheduler, speculator and worker of one engine."""

    scheduler: Scheduler
    speculator: Speculator
    worker: Worker
    lag: int
    next_step: int = 0
    in_flight: deque[InFlight] = field(default_factory=deque)
    _clock: IntervalClock = field(default_factory=IntervalClock)
    _schedule_seconds: deque[float] = field(default_factory=deque)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def step(self) -> StepOutcome | None:
        """Launch at most one step and retire at most one. None when nothing retired."""
        started = time.perf_counter()
        plan = self.scheduler.plan(self.next_step, self.speculator.plan)
        if plan is not None:
            self.in_flight.append(self.worker.launch(plan))
            self.next_step += 1
            self._schedule_seconds.append(time.perf_counter() - started)
        if self.in_flight and (plan is None or len(self.in_flight) >= self.lag):
            return self._retire()
        return None

    def _retire(self) -> StepOutcome:
        pipeline_full = len(self.in_flight) >= self.lag
        result = self.worker.retire(self.in_flight.popleft())
        interval = self._clock.observe(result.plan, time.perf_counter(), pipeline_full=pipeline_full)
        outputs, kept = self.scheduler.apply(result)
        self.speculator.observe(result)
        stats = step_stats(result, kept, width=self.speculator.width, scheduler=self.scheduler)
        stats.measured_seconds = interval
        stats.schedule_seconds = self._schedule_seconds.popleft()
        stats.preemptions, self.scheduler.num_preemptions = self.scheduler.num_preemptions, 0
        return StepOutcome(outputs=outputs, stats=stats, result=result, interval_seconds=interval)

    def drain(self) -> None:
        """Retire what is in flight and drop its outputs."""
        while self.in_flight:
            self._retire()

    def restart_counters(self) -> None:
        """Forget everything that calibration left: the first served step is like any engine's first step."""
        assert not self.in_flight, "steps are in flight"
        self.next_step = 0
        self._clock = IntervalClock()
        self.scheduler.num_preemptions = 0
