"""`xspec status` and `xspec top`: the right numbers, drawn anywhere, and a clear word on servers in trouble."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len
from rich.console import Console

from core.errors import ExitCode
from metrics.console import line, render
from metrics.prometheus import ServerMetrics
from metrics.report import Reading, Report, report_of
from metrics.status import PROCESS_START, Snapshot
from tests.http_rig import Rig, make_rig, rig
from tests.test_metrics import make_metrics, scrape, step_of
from xspec_cli import monitor as monitoring
from xspec_cli.main import cli
from xspec_cli.monitor import Monitor, Probe, parse_url
from xspec_cli.watch import to_json

__all__ = ["make_rig", "rig"]

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


# -- over HTTP --


def xspec(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


class Stub:
    """An HTTP server that answers with what `pages` holds: path -> (status, body)."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, str]] = {}
        self.paths: list[str] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.paths.append(self.path)
                status, body = stub.pages.get(self.path, (404, "none"))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.server.shutdown()
    stub.server.server_close()


def test_status_of_a_real_server(rig: Rig) -> None:
    rig.text_of_good_request()
    done = xspec("status", rig.url)
    assert done.exit_code == ExitCode.OK, done.output
    assert done.stdout.startswith(f" READY        {rig.url}   xspec 0.1.0")
    assert "\x1b" not in done.stdout
    assert re.search(r"^model +tiny +no draft +up to 512 tokens$", done.stdout, re.MULTILINE)
    found = json.loads(xspec("status", "--json", f"{rig.url}/v1/").stdout)
    assert found["state"] == "ready"
    assert found["window"] is None
    assert found["total"]["generation_tokens"] > 0
    assert found["total"]["time_to_first_token"]["count"] >= 1
    assert found["uptime_seconds"] > 0
    assert found["server_info"]


def test_watching_a_real_server_into_a_pipe(rig: Rig) -> None:
    done = xspec("top", rig.url, "--interval", "0.1", "--count", "2")
    assert done.exit_code == ExitCode.OK
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for text in lines:
        fields = dict(item.split("=", 1) for item in text.split()[1:])
        assert fields["state"] == "ready"
        assert {"tokens_per_s", "running", "kv_used", "ttft_p95_ms", "acceptance_length", "budget"} <= set(
            fields
        )
    done = xspec("status", rig.url, "--json", "--watch", "--interval", "0.1", "--count", "2")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["window"] is None
    assert second["window"]["seconds"] > 0


def test_a_server_that_starts_and_fails(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(announce_ready=False)
    rig.until(lambda: rig.client.get("/ready").json()["phase"] == "load")
    done = xspec("status", rig.url)
    assert done.exit_code == ExitCode.OK
    assert done.stdout.splitlines()[1].split() == ["phase", "load", "weights", "1/2"]
    rig.call(rig.frontend.fail, "rank 0 was killed")
    rig.until(lambda: rig.client.get("/ready").json()["state"] == "failed")
    done = xspec("status", rig.url)
    assert done.exit_code == ExitCode.RANK_DIED
    assert "rank 0 was killed" in done.stdout
    assert " FAILED " in done.stdout


def test_a_server_that_says_it_is_not_well_is_stale(stub: Stub) -> None:
    stub.pages = {
        "/metrics": (200, ready_metrics().render(None)[1].decode()),
        "/ready": (503, '{"state": "ready", "phase": "ready", "detail": "rank 0 is silent"}'),
        "/health": (503, "{}"),
    }
    found = json.loads(xspec("status", stub.url, "--json").stdout)
    assert (found["state"], found["error"]) == ("stale", "rank 0 is silent")
    assert found["model"] == "tiny", "from the labels: the routes that tell more may want a key"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_an_unreachable_server_is_one_line_and_exit_code_1() -> None:
    port = free_port()
    done = xspec("status", f":{port}")
    assert done.exit_code == ExitCode.UNEXPECTED
    assert done.stdout == ""
    expected = f"error: http://127.0.0.1:{port}: connection refused; is a server running there?\n"
    assert done.stderr == expected
    done = xspec("status", f":{port}", "--json")
    assert done.exit_code == ExitCode.UNEXPECTED
    assert json.loads(done.stdout)["state"] == "down"
    done = xspec("top", f":{port}", "--count", "1")
    assert done.exit_code == ExitCode.OK
    assert "state=down" in done.stdout


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (404, "none", "answers 404; is this an xspec server?"),
        (200, "<html>", "is no Prometheus text"),
        (200, "vllm:num_requests_running 3\n", "has no xspec_server_state"),
    ],
)
def test_other_servers_are_named(stub: Stub, status: int, body: str, fault: str) -> None:
    stub.pages["/metrics"] = status, body
    done = xspec("status", stub.url)
    assert done.exit_code == ExitCode.UNEXPECTED
    assert fault in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("sent", "fault"),
    [(b"SSH-2.0-OpenSSH\r\n", "no HTTP"), (b"", "no HTTP"), (None, "no answer within 0.2 s")],
)
def test_ports_that_do_not_speak_http(sent: bytes | None, fault: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            if sent is None:
                time.sleep(0.4)
            else:
                connection.recv(1000)
                connection.sendall(sent)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        found = Probe(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.2).read()
        thread.join()
    assert found.error is not None
    assert fault in found.error
    assert found.timed_out == (sent is None)


def test_an_answer_that_trickles_is_cut_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            try:
                for _ in range(40):
                    connection.sendall(b"x")
                    time.sleep(0.05)
            except OSError:
                pass
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        begun = time.monotonic()
        found = Probe(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.2).read()
        assert time.monotonic() - begun < 1
        thread.join()
    assert found.timed_out


def test_what_does_not_change_is_asked_once(stub: Stub) -> None:
    metrics = ready_metrics()
    stub.pages = {
        "/metrics": (200, metrics.render(None)[1].decode()),
        "/ready": (200, '{"state": "ready", "phase": "ready", "detail": ""}'),
        "/v1/models": (200, '{"data": [{"id": "m", "max_model_len": 99}]}'),
        "/version": (200, '{"version": "9.9"}'),
        "/server_info": (200, '{"device": {"kind": "cpu"}}'),
    }
    probe = Probe(stub.url, timeout_seconds=5)
    first = probe.read()
    assert (first.model, first.max_model_len, first.version) == ("m", 99, "9.9")
    assert first.server_info == {"device": {"kind": "cpu"}}
    second = probe.read(first)
    assert second.server_info == first.server_info
    every_time = ["/ready", "/health", "/metrics"]
    assert stub.paths == [*every_time, "/v1/models", "/version", "/server_info", *every_time]
    # Behind a proxy that shows /metrics alone, it is enough.
    stub.pages = {"/metrics": stub.pages["/metrics"], "/ready": (200, "<html>")}
    third = probe.read()
    assert third.error is None
    assert (third.state, third.model) == ("ready", None)
    assert report_of(third).model == "tiny"


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("http://host:9000/v1/", "http://host:9000"),
        ("https://host/xspec/metrics?x=1#y", "https://host/xspec"),
        ("host:9000", "http://host:9000"),
        ("localhost", "http://localhost"),
        (":9000", "http://127.0.0.1:9000"),
        ("9000", "http://127.0.0.1:9000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(written: str, url: str) -> None:
    assert parse_url(written) == url


@pytest.mark.parametrize(
    "written",
    ["file:///etc/passwd", "http://", "http://[::1", "http://h:99999", "http://user:secret@h", ":0", ""],
)
def test_what_is_no_address_is_a_usage_error(written: str) -> None:
    done = xspec("status", written)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr


def test_options_without_effect_are_refused() -> None:
    assert xspec("status", "--interval", "1").exit_code == ExitCode.USAGE
    assert xspec("status", "--count", "1").exit_code == ExitCode.USAGE


# -- terminals and processes --


def on_terminal(
    *arguments: str, signal_after: tuple[str, signal.Signals] | None = None, **environ: str
) -> tuple[int, str]:
    """Run xspec on a terminal of its own: (exit code, all that it wrote). The signal follows a text."""
    master, slave = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "xspec_cli", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**environment, "TERM": "xterm-256color", **environ},
    )
    os.close(slave)
    written = b""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 0.1)[0]:
            continue
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
        if signal_after is not None and signal_after[0].encode() in written:
            process.send_signal(signal_after[1])
            signal_after = None
    os.close(master)
    return process.wait(timeout=5), written.decode()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_leaving_top_restores_the_screen(rig: Rig, sent: signal.Signals) -> None:
    code, written = on_terminal("top", rig.url, signal_after=("speculation", sent))
    assert code == ExitCode.OK
    assert written.startswith("\x1b[?1049h"), "the alternate screen"
    assert written.rstrip().endswith("\x1b[?1049l")
    assert "\x1b[?25h" in written, "the cursor is back"
    assert "READY" in written
    assert "Traceback" not in written


def test_no_color_and_dumb_terminals(rig: Rig) -> None:
    code, written = on_terminal("top", rig.url, "--count", "1", TERM="dumb")
    assert code == ExitCode.OK
    assert "\x1b" not in written
    assert "state=ready" in written
    code, written = on_terminal("status", rig.url, NO_COLOR="1")
    assert code == ExitCode.OK
    assert "READY" in written
    assert not re.search(r"\x1b\[[0-9;]*(3[0-8]|4[0-8])", written), "no colour"


def test_status_imports_no_engine() -> None:
    code = (
        "import sys\nfrom xspec_cli.main import cli\n"
        f"try: cli(['status', ':{free_port()}'], prog_name='xspec')\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'fastapi', 'httpx', 'zmq', 'core.launcher', 'core.engine.loop'}\n"
        "found = heavy & set(sys.modules)\nprint(found)\nsys.exit(50 if found else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.UNEXPECTED, (done.stdout, done.stderr)
