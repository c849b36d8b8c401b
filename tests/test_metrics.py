"""What /metrics says: conservation of tokens, latencies per token, constant series, valid exposition."""

from __future__ import annotations

import itertools
import logging
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from metrics.families import FAMILIES
from metrics.prometheus import ServerMetrics
from metrics.stats import StepStats
from metrics.status import Snapshot
from tests.promtool import run_promtool

WIDTH = 7


def make_metrics(**settings: Any) -> ServerMetrics:
    base: dict[str, Any] = {
        "model_name": "tiny",
        "max_draft_tokens": WIDTH,
        "max_model_len": 4096,
        "drafter": "DSpark",
    }
    return ServerMetrics(**{**base, **settings})


def scrape(metrics: ServerMetrics) -> Snapshot:
    return Snapshot.parse(metrics.render(None)[1].decode())


def anomalies(snapshot: Snapshot) -> float:
    return snapshot.sum("xspec_metrics_anomalies_total")


def step_of(sequences: list[tuple[int, int, int, bool]], **fields: Any) -> StepStats:
    """Count a step of sequences (verified, accepted, truncated, already finished) as the engine does."""
    running = [s for s in sequences if not s[3]]
    stats = StepStats(
        step=1,
        num_sequences=len(sequences),
        prefill_tokens=0,
        proposed=WIDTH * len(running),
        speculative_sequence_steps=sum(verified > 0 for verified, *_ in running),
        plain_sequence_steps=sum(verified == 0 for verified, *_ in running),
        verified=sum(verified for verified, *_ in running),
        accepted=sum(accepted for _, accepted, *_ in running),
        truncated=sum(truncated for _, _, truncated, _ in running),
        emitted=sum(accepted + 1 - truncated for _, accepted, truncated, _ in running),
        discarded=sum(accepted + 1 for _, accepted, _, finished in sequences if finished),
        position_verified=[sum(v > p for v, *_ in running) for p in range(WIDTH)],
        position_accepted=[sum(a > p for _, a, *_ in running) for p in range(WIDTH)],
        draft_length_counts=[sum(v == n for v, *_ in running) for n in range(WIDTH + 1)],
        accepted_length_counts=[sum(a == n for _, a, *_ in running) for n in range(WIDTH + 1)],
    )
    for name, value in fields.items():
        setattr(stats, name, value)
    return stats


@st.composite
def sequence(draw: st.DrawFn) -> tuple[int, int, int, bool]:
    verified = draw(st.integers(0, WIDTH))
    accepted = draw(st.integers(0, verified))
    return verified, accepted, draw(st.integers(0, accepted)), draw(st.booleans())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(sequence(), max_size=6), max_size=6))
def test_tokens_are_conserved(steps: list[list[tuple[int, int, int, bool]]]) -> None:
    metrics = make_metrics()
    for index, sequences in enumerate(steps):
        metrics.observe_step(step_of(sequences, step=index))
    after = scrape(metrics)
    total = {
        name: after.sum(f"xspec_spec_{name}_tokens_total")
        for name in ("proposed", "verified", "accepted", "emitted", "truncated", "discarded")
    }
    sequence_steps = after.sum("xspec_spec_sequence_steps_total")
    assert total["emitted"] == total["accepted"] + sequence_steps - total["truncated"]
    assert total["accepted"] <= total["verified"] <= total["proposed"]
    flat = [s for sequences in steps for s in sequences]
    assert total["discarded"] == sum(accepted + 1 for _, accepted, _, finished in flat if finished)
    for side in ("verified", "accepted"):
        assert after.sum(f"xspec_spec_position_{side}_tokens_total") == total[side]
    assert after.sum("xspec_spec_draft_length_tokens_count") == sequence_steps
    assert after.sum("xspec_spec_draft_length_tokens_sum") == total["verified"]
    assert after.sum("xspec_spec_accepted_length_tokens_sum") == total["accepted"]
    assert anomalies(after) == 0


def test_each_position_has_its_own_denominator() -> None:
    metrics = make_metrics()
    metrics.observe_step(step_of([(7, 2, 0, False), (3, 3, 0, False), (0, 0, 0, False), (7, 7, 0, True)]))
    after = scrape(metrics)
    verified = [after.sum("xspec_spec_position_verified_tokens_total", position=str(p)) for p in range(WIDTH)]
    accepted = [after.sum("xspec_spec_position_accepted_tokens_total", position=str(p)) for p in range(WIDTH)]
    assert verified == [2, 2, 2, 1, 1, 1, 1]
    assert accepted == [2, 2, 1, 0, 0, 0, 0]
    assert after.sum("xspec_spec_sequence_steps_total", mode="speculative") == 2
    assert after.sum("xspec_spec_sequence_steps_total", mode="plain") == 1
    assert after.sum("xspec_spec_discarded_tokens_total", method="dspark") == 8


def test_inter_token_latency_has_one_sample_per_token_and_sums_to_the_whole_time() -> None:
    metrics = make_metrics()
    metrics.request_started()
    metrics.first_token(0.05)
    last = 0.0
    committed = [1, 4, 0, 2, 5]  # tokens per 10 ms step, after the first token at 0
    for step, n in enumerate(committed, start=1):
        now = 0.010 * step
        if n:  # a step without a token is no output and moves nothing
            metrics.tokens(now - last, n)
            metrics.output_interval(now - last)
            last = now
    after = scrape(metrics)
    later = sum(committed)
    assert after.sum("xspec_inter_token_latency_seconds_count") == later
    assert after.sum("xspec_inter_token_latency_seconds_sum") == pytest.approx(0.050)
    assert after.sum("xspec_output_interval_seconds_count") == 4
    assert after.sum("xspec_output_interval_seconds_sum") == pytest.approx(0.050)
    assert after.sum("xspec_generation_tokens_total") == later + 1
    # 2 and 2.5 ms each: fractions of a millisecond are kept
    assert after.sum("xspec_inter_token_latency_seconds_bucket", le="0.003") == 4 + 5


def test_an_output_without_tokens_is_no_event() -> None:
    metrics = make_metrics()
    before = scrape(metrics)
    metrics.tokens(0.01, 0)
    assert scrape(metrics).sum("xspec_inter_token_latency_seconds_count") == 0
    assert scrape(metrics).sum("xspec_generation_tokens_total") == before.sum("xspec_generation_tokens_total")


def finish(metrics: ServerMetrics, reason: str = "stop", **fields: Any) -> None:
    base: dict[str, Any] = {
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "generation_tokens": 3,
        "duration_seconds": 0.2,
    }
    metrics.request_finished(reason, **{**base, **fields})


def test_request_accounting() -> None:
    metrics = make_metrics()
    metrics.request_started()
    metrics.request_started()
    metrics.observe_step(step_of([(0, 0, 0, False)] * 2, running=2, waiting=1))
    finish(metrics, "length", time_per_output_token=0.01, queue_seconds=0.1, decode_seconds=0.05)
    assert scrape(metrics).sum("xspec_requests_in_flight") == 1
    assert scrape(metrics).sum("xspec_requests_running") == 2
    finish(metrics, "abort")
    metrics.request_rejected("too_long")
    after = scrape(metrics)
    assert after.sum("xspec_requests_in_flight") == 0
    assert after.sum("xspec_requests_running") == 0, "an abort ends the last request without a step"
    assert after.sum("xspec_requests_waiting") == 0
    assert after.sum("xspec_requests_finished_total", finish_reason="abort") == 1
    assert after.sum("xspec_requests_rejected_total", reason="too_long") == 1
    assert after.sum("xspec_prompt_tokens_total", source="computed") == 12
    assert after.sum("xspec_prompt_tokens_total", source="cached") == 8
    assert after.sum("xspec_request_generation_tokens_sum") == 6
    assert after.sum("xspec_time_per_output_token_seconds_count") == 1
    assert after.sum("xspec_request_phase_seconds_count", phase="queue") == 1
    assert after.sum("xspec_request_phase_seconds_count", phase="prefill") == 0
    assert anomalies(after) == 0


def decide(metrics: ServerMetrics, target_rows: int, bucket: int = 4, **fields: Any) -> None:
    rows = {"request_bucket": bucket, "full_width_rows": bucket * (WIDTH + 1), "decided": True}
    metrics.observe_step(step_of([], target_rows=target_rows, **{**rows, **fields}))


def test_budget_decisions_compare_shares_of_full_width() -> None:
    metrics = make_metrics()
    decide(metrics, 16)  # lower: full width is what runs before a decision
    decide(metrics, 16)  # hold
    decide(metrics, 32, bucket=8)  # hold: another bucket, the same share
    decide(metrics, 32, decided=False, fallback="transient")  # forced, and no new reference
    decide(metrics, 32)  # raise
    decide(metrics, 4)  # off: anchors alone
    decide(metrics, 8)  # raise
    decide(metrics, 0)  # prefill alone decides nothing
    decide(metrics, 4, full_width_rows=4, decided=False)  # nothing to decide at width 0
    after = scrape(metrics)
    counts = {
        d: after.sum("xspec_budget_decisions_total", decision=d)
        for d in ("raise", "hold", "lower", "off", "forced")
    }
    assert counts == {"raise": 2, "hold": 2, "lower": 1, "off": 1, "forced": 1}
    assert after.sum("xspec_budget_fallbacks_total", reason="transient") == 1
    assert after.sum("xspec_budget_tokens_count") == 8
    assert after.sum("xspec_budget_tokens_sum") == 16 + 16 + 32 + 32 + 32 + 4 + 8 + 4
    assert after.sum("xspec_budget_current_tokens") == 4
    assert after.sum("xspec_budget_full_width_tokens_total") == 32 + 32 + 64 + 32 * 4 + 4


def test_predictions_are_compared_over_the_same_steps() -> None:
    metrics = make_metrics()
    costs = {"expected_tokens": 6.0, "predicted_seconds": 0.010, "plain_seconds": 0.005}
    step = [(3, 2, 1, False), (3, 1, 0, False), (3, 0, 0, True)]
    metrics.observe_step(step_of(step, measured_seconds=0.008, **costs))
    metrics.observe_step(step_of(step, **costs))  # not measured: the pipeline was not full
    metrics.observe_step(step_of(step, measured_seconds=0.5))  # not predicted
    after = scrape(metrics)
    assert after.sum("xspec_step_predicted_seconds_total") == pytest.approx(0.010)
    assert after.sum("xspec_step_measured_seconds_total") == pytest.approx(0.008)
    assert after.sum("xspec_step_prediction_error_ratio_sum") == pytest.approx(0.25)
    assert after.sum("xspec_spec_expected_tokens_total") == 12
    assert after.sum("xspec_spec_realized_tokens_total") == 2 * 6
    assert after.sum("xspec_expected_speedup_ratio") == pytest.approx((6 / 0.010) / (3 / 0.005))
    assert after.sum("xspec_step_duration_seconds_count", phase="total") == 2


def test_engine_gauges_and_lifecycle() -> None:
    metrics = make_metrics(world_size=2)
    metrics.observe_step(
        step_of(
            [],
            prefill_tokens=30,
            cached_tokens=16,
            cache_lookup_tokens=46,
            pages_used=3,
            pages_cached=2,
            pages_free=5,
        )
    )
    metrics.set_state("ready")
    metrics.set_policy_state("adaptive")
    metrics.set_phase_seconds("kv", 1.5)
    metrics.set_rank_up(1, True)
    metrics.set_calibration(timestamp_seconds=1e9, mean_relative_error=0.01, max_relative_error=0.03)
    metrics.set_info(
        version="0.1.0", torch="2.13.0", device_type="cpu", cost_model="additive", config_sha256="ab"
    )
    after = scrape(metrics)
    assert after.sum("xspec_kv_cache_usage_ratio") == pytest.approx(0.3)
    assert after.sum("xspec_kv_cache_pages", state="cached") == 2
    assert after.sum("xspec_prefix_cache_hit_tokens_total") == 16
    assert after.sum("xspec_prefix_cache_lookup_tokens_total") == 46
    assert after.sum("xspec_server_state", state="ready") == 1 == after.sum("xspec_server_state")
    assert after.sum("xspec_policy_state", state="adaptive") == 1 == after.sum("xspec_policy_state")
    assert after.sum("xspec_startup_phase_seconds", phase="kv") == 1.5
    assert after.sum("xspec_rank_up", rank="0") == 0
    assert after.sum("xspec_rank_up", rank="1") == 1
    assert after.sum("xspec_calibration_runs_total", trigger="startup", result="ok") == 1
    assert after.sum("xspec_calibration_residual_ratio", statistic="max") == 0.03
    assert after.sum("xspec_build_info", version="0.1.0", device_type="cpu") == 1
    assert (
        after.sum("xspec_config_info", draft_method="dspark", max_draft_tokens="7", cost_model="additive")
        == 1
    )
    assert anomalies(after) == 0


def test_every_series_exists_at_zero_and_no_input_adds_one() -> None:
    metrics = make_metrics()
    before = scrape(metrics)
    own = {key: value for key, value in before.samples.items() if key[0].startswith("xspec_")}
    ones = {name for (name, _), value in own.items() if value != 0}
    assert ones <= {"xspec_server_state", "xspec_policy_state", "xspec_build_info", "xspec_config_info"}
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice('ab\n"\\{}é\U0001f600') for _ in range(rng.randrange(1, 300)))
        metrics.http_request(f"/{text}", text, rng.randrange(1000))
        metrics.http_request("/v1/completions", text, 200)
        metrics.request_rejected(text)
    metrics.observe_step(step_of([(7, 3, 0, False)] * 4, fallback="a new reason"))
    after = scrape(metrics)
    assert {key for key in after.samples if key[0].startswith("xspec_")} == set(own)
    assert after.sum("xspec_http_requests_total") == 1000
    assert after.sum("xspec_http_requests_total", handler="other") == 1000
    assert after.sum("xspec_requests_rejected_total", reason="other") == 500
    assert len(metrics.render(None)[1]) < 200_000
    metrics.http_request("/v1/completions", "POST", 200)
    assert scrape(metrics).sum("xspec_http_requests_total", handler="/v1/completions", code="200") == 1


def test_impossible_values_are_counted_and_logged_once_and_never_raise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = make_metrics()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            metrics.observe_step(step_of([(1, 1, 0, False)], preemptions=-1))
        metrics.first_token(-0.5)
        metrics.output_interval(math.nan)
        metrics.tokens(0.1, -2)
        metrics.request_started()
        finish(metrics)
        finish(metrics)  # finished twice
        metrics.observe_step(step_of([(3, 2, 0, False)], emitted=99))
        metrics.observe_step(step_of([], position_verified=[0] * WIDTH + [5], verified=5))  # beyond the width
        metrics.observe_step(None)  # type: ignore[arg-type]
        metrics.set_state("no such state")
    after = scrape(metrics)
    assert after.sum("xspec_preemptions_total") == 0
    assert after.sum("xspec_requests_in_flight") == 0
    assert after.sum("xspec_server_state", state="starting") == 1
    kinds = {
        kind: after.sum("xspec_metrics_anomalies_total", kind=kind)
        for kind in ("negative", "conservation", "unknown_label", "error")
    }
    assert kinds == {"negative": 8, "conservation": 1, "unknown_label": 2, "error": 1}
    logged = [
        record.getMessage() for record in caplog.records if "xspec_preemptions_total" in record.getMessage()
    ]
    assert len(logged) == 1


@pytest.mark.parametrize("drafter", [None, "DSpark"])
def test_exposition_is_valid(drafter: str | None) -> None:
    metrics = make_metrics(drafter=drafter, max_draft_tokens=WIDTH if drafter else 0)
    metrics.set_info(version='0.1"\n\\', torch="2.13.0")
    metrics.tokens(0.004, 3)
    content_type, body = metrics.render(None)
    assert content_type.startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    for family in FAMILIES.values():
        exported = families[family.name.removesuffix("_total") if family.kind == "counter" else family.name]
        assert exported.type == family.kind
        assert exported.documentation == family.help
    assert b"_created" not in body
    content_type, body = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert b"_created" not in body
    assert sum(1 for _ in parse_openmetrics(body.decode())) >= len(FAMILIES)


@pytest.mark.parametrize("drafter", [None, "DSpark"])
def test_promtool_accepts_the_page(drafter: str | None) -> None:
    metrics = make_metrics(drafter=drafter)
    metrics.observe_step(
        step_of([(7, 3, 0, False)] * 4, target_rows=16, request_bucket=4, full_width_rows=32)
    )
    run_promtool("check", "metrics", text=metrics.render(None)[1])


def test_bucket_bounds() -> None:
    metrics = make_metrics(max_model_len=300, buckets={"xspec_request_duration_seconds": [1, 2.5]})
    exposed = scrape(metrics)
    bounds = {
        dict(key)["le"] for name, key in exposed.samples if name == "xspec_request_duration_seconds_bucket"
    }
    assert bounds == {"1.0", "2.5", "+Inf"}
    assert metrics.series.histograms["xspec_request_prompt_tokens"][()].edges[-3:] == (100, 200, 300)
    for family in FAMILIES.values():
        for histogram in metrics.series.histograms.get(family.name, {}).values():
            assert all(a < b for a, b in itertools.pairwise(histogram.edges)), family.name
    for wrong in ({"xspec_request_duration_seconds": [2, 1]}, {"xspec_nothing": [1]}):
        with pytest.raises(ValueError, match="histogram buckets for"):
            make_metrics(buckets=wrong)


def test_quantiles_come_from_bucket_differences() -> None:
    metrics = make_metrics(buckets={"xspec_request_duration_seconds": [1, 2, 4]})
    for seconds in (9.0, 9.0, 9.0):
        finish(metrics, duration_seconds=seconds)
    earlier = scrape(metrics)
    assert earlier.quantile(0.5, "xspec_request_duration_seconds") == 4, "beyond the last bound"
    for seconds in (0.5, 1.5, 3, 3):
        finish(metrics, duration_seconds=seconds)
    between = scrape(metrics).minus(earlier)
    assert between.quantile(0.5, "xspec_request_duration_seconds") == 2
    assert between.quantile(0.75, "xspec_request_duration_seconds") == 3
    assert between.quantile(0.0, "xspec_request_duration_seconds") == 0
    assert earlier.minus(earlier).quantile(0.5, "xspec_request_duration_seconds") is None
    assert earlier.minus(between).sum("xspec_request_duration_seconds_count") == 3, (
        "a restart counts from zero"
    )
