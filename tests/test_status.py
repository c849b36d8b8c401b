"""`xspec status` and `xspec top`: the right numbers, drawn anywhere, and a clear word on servers in trouble."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from metrics.console import line, render
from metrics.prometheus import ServerMetrics
from metrics.report import Reading, Report, report_of
from metrics.status import PROCESS_START, Snapshot
from tests.status_readings import (
    URL,
    busy_report,
    drawn,
    finish_requests,
    reading,
    ready_metrics,
    silent,
    work,
)
from tests.test_metrics import make_metrics, scrape, step_of
from xspec_cli import monitor as monitoring
from xspec_cli.monitor import Monitor
from xspec_cli.watch import to_json

# -- figures --


def test_a_window_counts_only_what_happened_in_it() -> None:
    report = busy_report()
    window, total = report.window, report.total
    assert window is not None
    assert total is not None
    assert window.seconds == 10.0
    assert window.finished["stop"] == 20
    assert total.finished["stop"] == 120
    assert window.requests_per_second == 2.0
    assert window.generation_tokens == 10 * 10 + 20
    assert window.generation_tokens_per_second == 12.0
    assert window.time_to_first_token.count == 20
    assert window.time_to_first_token.p99_seconds == pytest.approx(0.04, rel=0.02)
    assert total.time_to_first_token.p99_seconds is not None
    assert total.time_to_first_token.p99_seconds > 5
    assert window.inter_token_latency.mean_seconds == pytest.approx(0.001)
    assert total.seconds == 10.0
    assert report.now is not None
    assert (report.now.in_flight, report.now.running, report.now.waiting) == (1, 3, 2)
    assert report.now.pages_used_ratio == 0.6


def test_acceptance_has_its_own_denominator_at_each_position() -> None:
    spec = busy_report().total.speculation  # type: ignore[union-attr]
    assert [p.verified for p in spec.positions] == [30, 20, 20, 20, 10, 10, 10]
    assert [p.accepted for p in spec.positions] == [30, 10, 10, 10, 10, 0, 0]
    assert [p.cumulative for p in spec.positions] == [1, 0.5, 0.5, 0.5, 1, 0, 0]
    # Of 30 that reached position 1 only 20 were verified there; at 4 all 10 that were left.
    assert [p.conditional for p in spec.positions] == [1, 0.5, 1, 1, 1, 0, None]
    assert spec.verified_ratio == pytest.approx(120 / 210)
    assert spec.accepted_ratio == pytest.approx(70 / 120)
    assert spec.acceptance_length == pytest.approx(100 / 30)
    assert spec.discarded == 40


def test_conditional_acceptance_is_exact_at_full_width() -> None:
    metrics = ready_metrics()
    metrics.observe_step(step_of([(7, n, 0, False) for n in (7, 5, 5, 2, 1, 0, 0, 0)]))
    positions = report_of(reading(metrics)).total.speculation.positions  # type: ignore[union-attr]
    assert [p.conditional for p in positions] == [5 / 8, 4 / 5, 3 / 4, 1, 1, 1 / 3, 1]
    assert [p.cumulative for p in positions] == [5 / 8, 4 / 8, 3 / 8, 3 / 8, 3 / 8, 1 / 8, 1 / 8]


def test_budget_and_prediction() -> None:
    figures = busy_report().figures
    assert figures is not None
    assert figures.budget.full_width_ratio == 0.5
    assert figures.budget.rows_per_step == 16
    assert figures.budget.decisions["lower"] == 1
    assert figures.budget.decisions["hold"] == 9
    assert figures.steps.prediction_bias == pytest.approx(0.1)
    assert figures.steps.predicted_mean_seconds == pytest.approx(0.011)
    assert figures.steps.measured_mean_seconds == pytest.approx(0.010)


def test_nothing_yet_is_unknown_and_not_zero() -> None:
    report = report_of(reading(ready_metrics()))
    figures = report.total
    assert figures is not None
    assert figures.speculation.acceptance_length is None
    assert figures.time_to_first_token.p50_seconds is None
    assert figures.steps.prediction_bias is None
    assert figures.budget.full_width_ratio is None
    assert report.now is not None
    assert report.now.pages_used_ratio is None
    text = "\n".join(drawn(report))
    assert "no decode step yet" in text
    assert "nan" not in text.lower()


def test_a_restarted_server_counts_from_zero() -> None:
    old = ready_metrics()
    work(old, steps=50)
    new = ready_metrics()
    work(new, steps=2)
    finish_requests(new, 1, ttft=0.1)
    before, after = scrape(old), scrape(new)
    restarted = Snapshot({**after.samples, (PROCESS_START, frozenset()): 5e9})
    assert restarted.minus(before) is restarted
    looks = iter(
        [
            reading(before, clock=0),
            reading(restarted, clock=2),
            reading(restarted, clock=4),
        ]
    )
    monitor = Monitor(lambda known: next(looks), window_seconds=10)
    assert monitor.look().window is None
    first = monitor.look()
    assert first.window is None, "nothing is known of the time between two lives"
    assert first.total is not None
    assert first.total.generation_tokens == 21
    second = monitor.look()
    assert second.window is not None
    assert second.window.generation_tokens == 0
    assert second.trend == (0.0,)


def test_a_series_that_fell_without_a_restart_never_gives_a_negative_rate() -> None:
    many, few = ready_metrics(), ready_metrics()
    work(many, steps=50)
    work(few, steps=2)
    report = report_of(reading(few, clock=10), earlier=reading(many))
    assert report.window is not None
    assert report.window.generation_tokens_per_second == 2.0
    assert all(p.verified >= 0 for p in report.window.speculation.positions)
    assert drawn(report)


# -- trouble --


def monitor_of(*looks: Reading) -> Monitor:
    queue = iter(looks)
    return Monitor(lambda known: next(queue), window_seconds=10)


def test_a_server_that_is_down_is_one_clear_row() -> None:
    report = monitor_of(silent(0, timed_out=False)).look()
    assert report.state == "down"
    lines = drawn(report)
    assert lines[0].split() == ["DOWN", URL, "xspec"]
    assert lines[1].split() == ["error", "connection", "refused"]
    assert len(lines) == 2
    assert line(report).split()[1] == "state=down"


def test_silence_keeps_the_last_figures_and_absence_drops_them() -> None:
    metrics = ready_metrics()
    work(metrics)
    monitor = monitor_of(
        reading(metrics, clock=0),
        silent(3, timed_out=True),
        silent(6, timed_out=True),
        silent(9, timed_out=False),
        reading(metrics, clock=12),
    )
    assert monitor.look().state == "ready"
    assert monitor.look().age_seconds == 3
    stale = monitor.look()
    assert (stale.state, stale.age_seconds, stale.error) == ("stale", 6, "no answer within 2 s")
    assert stale.now is not None
    text = "\n".join(drawn(stale))
    assert "STALE" in text
    assert "6 s ago; the figures below are as old" in text
    assert "acceptance length" in text
    gone = monitor.look()
    assert (gone.state, gone.now, gone.age_seconds) == ("down", None, 9)
    assert "9 s ago; it has gone since" in "\n".join(drawn(gone))
    assert monitor.look().state == "ready"


def test_requests_without_steps_are_stale_and_an_idle_server_is_not() -> None:
    idle, stuck = ready_metrics(), ready_metrics()
    stuck.request_started()
    assert [r.state for r in looks_of(idle, 0, 20)] == ["ready", "ready"]
    states = looks_of(stuck, 0, monitoring.STALL_SECONDS - 1, monitoring.STALL_SECONDS + 1)
    assert [r.state for r in states] == ["ready", "ready", "stale"]
    assert states[-1].error == "1 requests in flight and no step for 11 s"


def looks_of(metrics: ServerMetrics, *clocks: float) -> list[Report]:
    monitor = monitor_of(*(reading(metrics, clock=clock) for clock in clocks))
    return [monitor.look() for _ in clocks]


def test_a_starting_server_shows_its_phase_and_no_figures() -> None:
    starting = reading(make_metrics(), state="starting", phase="calibrate", detail="3/12")
    lines = drawn(report_of(starting))
    assert lines[0].startswith(" STARTING ")
    assert lines[1].split() == ["phase", "calibrate", "3/12"]
    assert not any(text.startswith("latency") for text in lines)
    assert "phase=calibrate" in line(report_of(starting))


# -- drawing --


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100, 106, 132, 200])
@pytest.mark.parametrize("make", [busy_report, lambda: report_of(reading(ready_metrics()))])
def test_no_line_is_wider_than_the_screen(width: int, make: Callable[[], Report]) -> None:
    report = replace(make(), error="a long error that goes on " * 8, model="模型" * 40, age_seconds=5)
    lines = drawn(report, width=width)
    assert max(map(cell_len, lines)) <= width
    labels = [text[:14].strip() for text in lines]
    for label in (
        "error",
        "model",
        "throughput",
        "requests",
        "KV pages",
        "TTFT",
        "TPOT",
        "ITL",
        "speculation",
    ):
        assert label in labels
    assert sum("a long error" in text for text in lines) > 1, "an error is broken between words, never cut"


def test_what_the_screen_says() -> None:
    text = re.sub(" +", " ", "\n".join(drawn(busy_report(), width=132)))
    for said in (
        "READY http://127.0.0.1:8000 xspec 0.1.0 on cpu up 10 s",
        "tiny dspark, 7 drafts, adaptive",
        "12.0 tokens/s ▁▅█ 2.00 requests/s",
        "3 running 2 waiting 1 in flight",
        "60.0% 60 used 10 cached 30 free",
        "acceptance length 3.33 verified 57.1% (120 of 210 proposed) accepted 58.3% of verified",
        "discarded 40",
        "conditional █100% ▅ 50% █100% █100% █100% ▁ 0% -",
        "cumulative █100% ▅ 50% ▅ 50% ▅ 50% █100% ▁ 0% ▁ 0%",
        "███████████████░░░░░░░░░░░░░░░ 50.0% of full width 16.00 of 32.00 rows a step newest 16",
        "9 hold, 1 lower fallbacks 0",
        "predicted 11.0 ms, measured 10.0 ms (+10.0%)",
    ):
        assert said in text


def test_a_low_terminal_keeps_what_matters() -> None:
    lines = drawn(busy_report(), width=80, max_height=24)
    assert len(lines) <= 24
    labels = {text[:14].strip() for text in lines}
    assert {"READY", "throughput", "TTFT", "conditional", "budget", "step time"} <= labels


def test_ascii_terminals_get_ascii() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=80)
    console.print(render(busy_report()))
    console.file.flush()
    assert b"####" in raw.getvalue()


def test_a_server_cannot_steer_the_terminal() -> None:
    report = replace(busy_report(), model="\x1b[2Jevil\r\n", state="stale", error="\x1b]0;title\x07 bad")
    for text in (*drawn(report), line(report)):
        assert "\x1b" not in text
        assert "\x07" not in text


# -- JSON --

LATENCY = {"count", "mean_seconds", "p50_seconds", "p95_seconds", "p99_seconds"}
FIGURES: dict[str, Any] = {
    "seconds": None,
    "finished": {"stop", "length", "abort", "error"},
    "rejected": {"queue_full", "too_long", "draining", "invalid", "unauthorized", "not_found", "other"},
    "generation_tokens": None,
    "prompt_tokens": None,
    "cached_prompt_tokens": None,
    "requests_per_second": None,
    "generation_tokens_per_second": None,
    "prefill_tokens_per_second": None,
    "preemptions": None,
    "time_to_first_token": LATENCY,
    "time_per_output_token": LATENCY,
    "inter_token_latency": LATENCY,
    "output_interval": LATENCY,
    "request_duration": LATENCY,
    "speculation": {
        "sequence_steps", "plain_sequence_steps", "proposed", "verified", "accepted", "emitted", "truncated",
        "discarded", "verified_ratio", "accepted_ratio", "acceptance_length", "positions",
    },
    "budget": {
        "steps", "rows_per_step", "full_width_rows_per_step", "full_width_ratio", "decisions", "fallbacks",
        "expected_tokens", "realized_tokens",
    },
    "steps": {
        "count", "schedule_mean_seconds", "total_mean_seconds", "predicted_mean_seconds",
        "measured_mean_seconds", "prediction_bias", "prediction_error_p50", "prediction_error_p95",
    },
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    **dict.fromkeys(
        (
            "url", "state", "error", "phase", "detail", "age_seconds", "taken_at", "uptime_seconds", "version",
            "model", "max_model_len", "device", "draft_method", "max_draft_tokens", "policy", "trend",
            "server_info",
        )
    ),
    "now": {
        "in_flight", "running", "waiting", "pages_used", "pages_cached", "pages_free", "pages_used_ratio",
        "budget_rows", "expected_speedup", "metrics_anomalies",
    },
    "window": FIGURES,
    "total": FIGURES,
}  # fmt: skip


def assert_keys(found: dict[str, Any], schema: dict[str, Any] | set[str]) -> None:
    assert set(found) == set(schema)
    if isinstance(schema, dict):
        for name, inner in schema.items():
            if inner is not None and name not in ("rejected",):
                assert_keys(found[name], inner)


def test_json_has_these_fields_and_scripts_may_rely_on_them() -> None:
    """A field may be added here; one that is renamed or goes breaks scripts."""
    found = json.loads(to_json(busy_report()))
    assert_keys(found, SCHEMA)
    positions = found["total"]["speculation"]["positions"]
    assert set(positions[0]) == {"position", "verified", "accepted", "conditional", "cumulative"}
    assert [p["position"] for p in positions] == list(range(7))
    down = json.loads(to_json(monitor_of(silent(0, timed_out=False)).look()))
    assert set(down) == set(SCHEMA)
    assert (down["state"], down["now"], down["total"]) == ("down", None, None)


def test_json_holds_no_nan() -> None:
    metrics = ready_metrics()
    metrics.series.set("xspec_expected_speedup_ratio", float("nan"))
    assert json.loads(to_json(report_of(reading(metrics))))["now"]["expected_speedup"] is None
