"""What `xspec status` and `xspec top` say about a server, as numbers: from one scrape, or from two.

Knows neither HTTP nor terminals. `Figures` are sums and ratios over some time: since the server started, or
between two scrapes. A ratio without a denominator is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from metrics.status import PROCESS_START, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at a server: what its routes answered, or why they did not."""

    url: str
    taken_at: float  # Unix seconds of this machine
    clock: float  # monotonic seconds of this machine
    error: str | None = None
    timed_out: bool = False
    state: str = "down"
    phase: str = ""
    detail: str = ""
    model: str | None = None
    max_model_len: int | None = None
    version: str | None = None
    server_info: Mapping[str, Any] | None = None
    server_time: float | None = None  # Unix seconds of the server, where it says so
    metrics: Snapshot | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One histogram of seconds."""

    count: int
    mean_seconds: float | None
    p50_seconds: float | None
    p95_seconds: float | None
    p99_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Acceptance at one draft position (0-based).

    cumulative: this position and all before it accepted, of the drafts verified here. conditional: of those
    whose predecessor was accepted too; where sequences differ in drafts it is a lower bound, else exact.
    """

    position: int
    verified: int
    accepted: int
    conditional: float | None
    cumulative: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    sequence_steps: int
    plain_sequence_steps: int
    proposed: int
    verified: int
    accepted: int
    emitted: int
    truncated: int
    discarded: int
    verified_ratio: float | None  # verified over proposed
    accepted_ratio: float | None  # accepted over verified
    acceptance_length: float | None  # tokens per sequence step, bonus included, before truncation
    positions: tuple[Position, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Target rows that ran, beside those of full width."""

    steps: int
    rows_per_step: float | None
    full_width_rows_per_step: float | None
    full_width_ratio: float | None
    decisions: Mapping[str, int]
    fallbacks: Mapping[str, int]
    expected_tokens: float
    realized_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Step times. The means of predicted and measured are over steps that have both."""

    count: int
    schedule_mean_seconds: float | None
    total_mean_seconds: float | None
    predicted_mean_seconds: float | None
    measured_mean_seconds: float | None
    prediction_bias: float | None  # predicted over measured, minus 1
    prediction_error_p50: float | None
    prediction_error_p95: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What happened within `seconds`, which is None if unknown."""

    seconds: float | None
    finished: Mapping[str, int]  # by finish reason
    rejected: Mapping[str, int]  # by reason
    generation_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    requests_per_second: float | None
    generation_tokens_per_second: float | None
    prefill_tokens_per_second: float | None
    preemptions: int
    time_to_first_token: Latency
    time_per_output_token: Latency
    inter_token_latency: Latency
    output_interval: Latency
    request_duration: Latency
    speculation: Speculation
    budget: Budget
    steps: Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What holds now."""

    in_flight: int
    running: int
    waiting: int
    pages_used: int
    pages_cached: int
    pages_free: int
    pages_used_ratio: float | None
    budget_rows: int  # of the newest step
    expected_speedup: float | None
    metrics_anomalies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that one screen shows. `state`: down, stale, starting, ready, draining or failed.

    stale: the server answered before and is silent now, or has requests and makes no step. The figures are
    then the last ones known, `age_seconds` old. `total` is since the start, `window` between two scrapes.
    """

    url: str
    state: str
    error: str | None = None
    phase: str = ""
    detail: str = ""
    age_seconds: float = 0.0
    taken_at: float = 0.0
    uptime_seconds: float | None = None
    version: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    device: str | None = None
    draft_method: str | None = None
    max_draft_tokens: int | None = None
    policy: str | None = None
    now: Gauges | None = None
    window: Figures | None = None
    total: Figures | None = None
    trend: tuple[float, ...] = ()  # generated tokens per second between past scrapes, oldest first
    server_info: Mapping[str, Any] | None = field(default=None)

    @property
    def figures(self) -> Figures | None:
        """The newest figures there are."""
        return self.window or self.total


def report_of(reading: Reading, *, earlier: Reading | None = None, trend: tuple[float, ...] = ()) -> Report:
    """Report on one reading; with an `earlier` one of the same server also on the time between them."""
    metrics = reading.metrics
    if metrics is None:
        return Report(url=reading.url, state=reading.state, error=reading.error, taken_at=reading.taken_at)
    config, build = metrics.info("xspec_config_info"), metrics.info("xspec_build_info")
    uptime = _uptime(reading, metrics)
    startup = metrics.sum("xspec_startup_phase_seconds", phase="ready")
    serving = None if uptime is None else max(0.0, uptime - startup)
    window = None
    if earlier is not None and earlier.metrics is not None and not metrics.is_restart_of(earlier.metrics):
        window = figures_of(metrics.minus(earlier.metrics), seconds=reading.clock - earlier.clock)
    drafts = config.get("max_draft_tokens", "")
    return Report(
        url=reading.url,
        state=reading.state,
        error=reading.error,
        phase=reading.phase,
        detail=reading.detail,
        taken_at=reading.taken_at,
        uptime_seconds=uptime,
        version=reading.version or build.get("version"),
        model=reading.model or metrics.info("xspec_server_state").get("model_name"),
        max_model_len=reading.max_model_len,
        device=build.get("device_type") or None,
        draft_method=config.get("draft_method") or None,
        max_draft_tokens=int(drafts) if drafts.isdigit() else None,
        policy=metrics.info("xspec_policy_state").get("state"),
        now=gauges_of(metrics),
        window=window,
        total=figures_of(metrics, seconds=serving),
        trend=trend,
        server_info=reading.server_info,
    )


def gauges_of(metrics: Snapshot) -> Gauges:
    pages = metrics.values("xspec_kv_cache_pages", "state")
    return Gauges(
        in_flight=int(metrics.sum("xspec_requests_in_flight")),
        running=int(metrics.sum("xspec_requests_running")),
        waiting=int(metrics.sum("xspec_requests_waiting")),
        pages_used=int(pages.get("used", 0)),
        pages_cached=int(pages.get("cached", 0)),
        pages_free=int(pages.get("free", 0)),
        pages_used_ratio=_ratio(pages.get("used", 0.0), sum(pages.values())),
        budget_rows=int(metrics.sum("xspec_budget_current_tokens")),
        expected_speedup=metrics.sum("xspec_expected_speedup_ratio") or None,
        metrics_anomalies=int(metrics.sum("xspec_metrics_anomalies_total")),
    )


def figures_of(delta: Snapshot, *, seconds: float | None) -> Figures:
    """Figures of counters and histograms that grew from zero to `delta` within `seconds`."""
    finished = _counts(delta, "xspec_requests_finished_total", "finish_reason")
    generated = delta.sum("xspec_generation_tokens_total")
    prompts = delta.values("xspec_prompt_tokens_total", "source")
    return Figures(
        seconds=seconds,
        finished=finished,
        rejected=_counts(delta, "xspec_requests_rejected_total", "reason"),
        generation_tokens=int(generated),
        prompt_tokens=int(sum(prompts.values())),
        cached_prompt_tokens=int(prompts.get("cached", 0)),
        requests_per_second=_ratio(sum(finished.values()), seconds),
        generation_tokens_per_second=_ratio(generated, seconds),
        prefill_tokens_per_second=_ratio(delta.sum("xspec_prefill_tokens_total"), seconds),
        preemptions=int(delta.sum("xspec_preemptions_total")),
        time_to_first_token=_latency(delta, "xspec_time_to_first_token_seconds"),
        time_per_output_token=_latency(delta, "xspec_time_per_output_token_seconds"),
        inter_token_latency=_latency(delta, "xspec_inter_token_latency_seconds"),
        output_interval=_latency(delta, "xspec_output_interval_seconds"),
        request_duration=_latency(delta, "xspec_request_duration_seconds"),
        speculation=_speculation(delta),
        budget=_budget(delta),
        steps=_steps(delta),
    )


def _latency(delta: Snapshot, histogram: str) -> Latency:
    count = delta.sum(f"{histogram}_count")
    return Latency(
        count=int(count),
        mean_seconds=_ratio(delta.sum(f"{histogram}_sum"), count),
        p50_seconds=delta.quantile(0.5, histogram),
        p95_seconds=delta.quantile(0.95, histogram),
        p99_seconds=delta.quantile(0.99, histogram),
    )


def _speculation(delta: Snapshot) -> Speculation:
    steps = delta.values("xspec_spec_sequence_steps_total", "mode")
    names = ("proposed", "verified", "accepted", "emitted", "truncated", "discarded")
    tokens = {name: delta.sum(f"xspec_spec_{name}_tokens_total") for name in names}
    all_steps = sum(steps.values())
    return Speculation(
        sequence_steps=int(all_steps),
        plain_sequence_steps=int(steps.get("plain", 0)),
        **{name: int(count) for name, count in tokens.items()},
        verified_ratio=_ratio(tokens["verified"], tokens["proposed"]),
        accepted_ratio=_ratio(tokens["accepted"], tokens["verified"]),
        acceptance_length=_ratio(tokens["accepted"] + all_steps, all_steps),
        positions=_positions(delta),
    )


def _positions(delta: Snapshot) -> tuple[Position, ...]:
    verified = _counts(delta, "xspec_spec_position_verified_tokens_total", "position")
    accepted = _counts(delta, "xspec_spec_position_accepted_tokens_total", "position")
    found = []
    before: int | None = None
    for name in sorted((name for name in verified if name.isdigit()), key=int):
        tried, kept = verified[name], accepted.get(name, 0)
        # Only those whose predecessor was accepted can be accepted here, and only those verified are tried.
        reached = tried if before is None else min(tried, before)
        found.append(
            Position(
                position=int(name),
                verified=tried,
                accepted=kept,
                conditional=_ratio(kept, reached),
                cumulative=_ratio(kept, tried),
            )
        )
        before = kept
    return tuple(found)


def _budget(delta: Snapshot) -> Budget:
    steps = delta.sum("xspec_budget_tokens_count")
    rows = delta.sum("xspec_budget_tokens_sum")
    full = delta.sum("xspec_budget_full_width_tokens_total")
    return Budget(
        steps=int(steps),
        rows_per_step=_ratio(rows, steps),
        full_width_rows_per_step=_ratio(full, steps),
        full_width_ratio=_ratio(rows, full),
        decisions=_counts(delta, "xspec_budget_decisions_total", "decision"),
        fallbacks=_counts(delta, "xspec_budget_fallbacks_total", "reason"),
        expected_tokens=delta.sum("xspec_spec_expected_tokens_total"),
        realized_tokens=delta.sum("xspec_spec_realized_tokens_total"),
    )


def _steps(delta: Snapshot) -> Steps:
    duration, error = "xspec_step_duration_seconds", "xspec_step_prediction_error_ratio"
    predicted = delta.sum("xspec_step_predicted_seconds_total")
    measured = delta.sum("xspec_step_measured_seconds_total")
    compared = delta.sum(f"{error}_count")
    quotient = _ratio(predicted, measured)

    def mean(phase: str) -> float | None:
        return _ratio(delta.sum(f"{duration}_sum", phase=phase), delta.sum(f"{duration}_count", phase=phase))

    return Steps(
        count=int(delta.sum("xspec_step_tokens_count")),
        schedule_mean_seconds=mean("schedule"),
        total_mean_seconds=mean("total"),
        predicted_mean_seconds=_ratio(predicted, compared),
        measured_mean_seconds=_ratio(measured, compared),
        prediction_bias=None if quotient is None else quotient - 1.0,
        prediction_error_p50=delta.quantile(0.5, error),
        prediction_error_p95=delta.quantile(0.95, error),
    )


def _counts(delta: Snapshot, name: str, label: str) -> dict[str, int]:
    return {value: int(count) for value, count in delta.values(name, label).items()}


def _ratio(numerator: float, denominator: float | None) -> float | None:
    return numerator / denominator if denominator else None


def _uptime(reading: Reading, metrics: Snapshot) -> float | None:
    """Seconds since the server's process started, by the server's own clock where it tells the time."""
    started = metrics.sum(PROCESS_START)
    if not started:
        return None
    now = reading.taken_at if reading.server_time is None else reading.server_time
    return max(0.0, now - started)
