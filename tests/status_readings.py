"""Readings of a scripted server, for the tests of `xspec status` and `xspec top`."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from metrics.console import render
from metrics.prometheus import ServerMetrics
from metrics.report import Reading, Report, report_of
from metrics.status import PROCESS_START, Snapshot
from tests.test_metrics import make_metrics, scrape, step_of

URL = "http://127.0.0.1:8000"


def reading(metrics: ServerMetrics | Snapshot, *, clock: float = 0.0, **fields: Any) -> Reading:
    snapshot = metrics if isinstance(metrics, Snapshot) else scrape(metrics)
    base: dict[str, Any] = {"state": "ready", "phase": "ready", "model": "tiny", "version": "0.1.0"}
    started = snapshot.sum(PROCESS_START)
    return Reading(url=URL, taken_at=started + clock, clock=clock, metrics=snapshot, **{**base, **fields})


def silent(clock: float, *, timed_out: bool) -> Reading:
    error = "no answer within 2 s" if timed_out else "connection refused"
    return Reading(url=URL, taken_at=clock, clock=clock, error=error, timed_out=timed_out)


def ready_metrics() -> ServerMetrics:
    metrics = make_metrics()
    metrics.set_state("ready")
    metrics.set_policy_state("adaptive")
    metrics.set_info(version="0.1.0", device_type="cpu")
    return metrics


def work(metrics: ServerMetrics, *, steps: int = 10) -> None:
    """Steps of three sequences that verify 7, 4 and 1 drafts and accept 5, 1 and 1; ten tokens each."""
    for step in range(steps):
        stats = step_of(
            [(7, 5, 0, False), (4, 1, 0, False), (1, 1, 0, False), (3, 3, 0, True)],
            step=step,
            target_rows=16,
            full_width_rows=32,
            request_bucket=4,
            decided=True,
            predicted_seconds=0.011,
            measured_seconds=0.010,
            expected_tokens=9.0,
            plain_seconds=0.008,
            schedule_seconds=0.001,
            running=3,
            waiting=2,
            pages_used=60,
            pages_cached=10,
            pages_free=30,
        )
        metrics.observe_step(stats)
        metrics.tokens(0.010, 10)


def finish_requests(metrics: ServerMetrics, number: int, *, ttft: float) -> None:
    for _ in range(number):
        metrics.request_started()
        metrics.first_token(ttft)
        metrics.request_finished("stop", prompt_tokens=7, generation_tokens=1, duration_seconds=ttft)


def busy_report() -> Report:
    metrics = ready_metrics()
    finish_requests(metrics, 100, ttft=9.0)  # before the window: no figure of the window may see it
    before = reading(metrics)
    metrics.request_started()
    work(metrics)
    finish_requests(metrics, 20, ttft=0.03)
    return report_of(reading(metrics, clock=10.0), earlier=before, trend=(1.0, 5.0, 10.0))


def drawn(report: Report, *, width: int = 100, max_height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(render(report, max_height=max_height))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return text.rstrip("\n").split("\n")
