"""Every metric of the server, once, as data: name, type, help, labels, buckets.

The exporter, docs/metrics.md, the dashboards and the tests all read this table, so they cannot disagree.
All families carry the labels `model_name` and `engine` besides the ones listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

BASE_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What label values and bucket edges depend on; known when the server starts."""

    max_draft_tokens: int
    max_model_len: int
    method: str
    world_size: int


@dataclass(frozen=True, slots=True)
class Label:
    """A label with its closed set of values; `values` is None where the set is known only at startup."""

    name: str
    values: tuple[str, ...] | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Upper bounds of a histogram, +Inf excluded; `text` is what the reference prints."""

    text: str
    edges: Callable[[Limits], tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: Buckets | None = None


def _counter(name: str, text: str, *labels: Label) -> Family:
    return Family(name=name, kind="counter", help=text, labels=labels)


def _gauge(name: str, text: str, *labels: Label) -> Family:
    return Family(name=name, kind="gauge", help=text, labels=labels)


def _histogram(name: str, buckets: Buckets, text: str, *labels: Label) -> Family:
    return Family(name=name, kind="histogram", help=text, labels=labels, buckets=buckets)


def _fixed(*edges: float) -> Buckets:
    return Buckets(" ".join(f"{edge:g}" for edge in edges), lambda limits: edges)


def _one_two_five(limits: Limits) -> tuple[float, ...]:
    """1, 2, 5, 10, ... below the longest context, which is the last edge."""
    edges = [m * 10**e for e in range(9) for m in (1, 2, 5) if m * 10**e < limits.max_model_len]
    return (*map(float, edges), float(limits.max_model_len))


# First bounds suit decoding in the low milliseconds. Every boundary that OpenTelemetry and vLLM use up to 5 s
# is among them, so a target that is a bucket edge there is one here.
_FIRST_TOKEN = _fixed(
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75,
    1, 1.5, 2, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
_PER_TOKEN = _fixed(
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04,
    0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10,
)  # fmt: skip
_DURATION = _fixed(
    0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960, 1920
)
_PHASE = _fixed(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
_STEP = _fixed(
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.5, 1, 2, 5,
)  # fmt: skip
_ERROR_RATIO = _fixed(0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_POWERS = _fixed(*(float(2**e) for e in range(11)))
_STEP_TOKENS = _fixed(*(float(2**e) for e in range(15)))
_CONTEXT = Buckets("1 2 5 10 20 50 ... up to max_model_len", _one_two_five)
_DRAFTS = Buckets("0 1 2 ... K", lambda limits: tuple(float(n) for n in range(limits.max_draft_tokens + 1)))

FINISH_REASONS = ("stop", "length", "abort", "error")
REJECT_REASONS = ("queue_full", "too_long", "draining", "invalid", "unauthorized", "not_found", "other")
SERVER_STATES = ("starting", "loading", "warmup", "calibrating", "ready", "draining", "failed")
STARTUP_PHASES = ("load", "kv", "warmup", "calibrate", "ready")
POLICY_STATES = ("adaptive", "fixed", "flat", "off")
DECISIONS = ("raise", "hold", "lower", "off", "forced")
FALLBACK_REASONS = ("no_profile", "transient", "pause", "other")
ANOMALIES = ("negative", "conservation", "unknown_label", "error")
ROUTES = (
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/health", "GET"),
    ("/ready", "GET"),
    ("/metrics", "GET"),
    ("/version", "GET"),
    ("/server_info", "GET"),
)
HTTP_CODES = ("200", "400", "401", "404", "405", "408", "413", "422", "429", "499", "500", "503", "other")

_METHOD = Label("method", None, "the drafter: dspark, mtp, none")
_POSITION = Label("position", None, "draft position, 0 to K-1")
_RANK = Label("rank", None, "0 to world_size-1")
_TOTAL = Label("phase", ("total",))

REQUESTS = (
    _counter(
        "xspec_requests_finished_total",
        "Requests that ended after they were accepted.",
        Label("finish_reason", FINISH_REASONS),
    ),
    _counter(
        "xspec_requests_rejected_total", "Requests refused before execution.", Label("reason", REJECT_REASONS)
    ),
    _gauge(
        "xspec_requests_in_flight", "Requests accepted by the server and not yet finished, wherever they are."
    ),
    _gauge("xspec_requests_running", "Sequences that hold a place in the batch."),
    _gauge("xspec_requests_waiting", "Sequences waiting for a place or for KV pages."),
    _counter(
        "xspec_prompt_tokens_total",
        "Prompt tokens of finished requests: computed here, or taken from the prefix cache.",
        Label("source", ("computed", "cached")),
    ),
    _counter(
        "xspec_generation_tokens_total",
        "Tokens generated for requests; the sum of completion_tokens over all responses.",
    ),
    _histogram("xspec_request_prompt_tokens", _CONTEXT, "Prompt tokens per finished request."),
    _histogram("xspec_request_generation_tokens", _CONTEXT, "Generated tokens per finished request."),
    _counter(
        "xspec_http_requests_total",
        "HTTP requests by route; a path or method that is no route counts as other.",
        Label("handler", (*dict.fromkeys(route for route, _ in ROUTES), "other")),
        Label("method", ("GET", "POST", "other")),
        Label("code", HTTP_CODES),
    ),
)

LATENCY = (
    _histogram(
        "xspec_time_to_first_token_seconds",
        _FIRST_TOKEN,
        "Arrival of a request, before its prompt is tokenized, to its first token.",
    ),
    _histogram(
        "xspec_time_per_output_token_seconds",
        _PER_TOKEN,
        "Per finished request: first to last token, divided by tokens after the first; needs two tokens.",
    ),
    _histogram(
        "xspec_inter_token_latency_seconds",
        _PER_TOKEN,
        "One sample per token after the first output: the gap before its output divided by tokens in it.",
    ),
    _histogram(
        "xspec_output_interval_seconds",
        _PER_TOKEN,
        "One sample per output of one or more tokens: the gap since the output before. Shows burstiness.",
    ),
    _histogram("xspec_request_duration_seconds", _DURATION, "Arrival of a request to its last token."),
    _histogram(
        "xspec_request_phase_seconds",
        _PHASE,
        "Time of a finished request in one phase, where it was measured.",
        Label("phase", ("queue", "prefill", "decode")),
    ),
)

SPECULATION = (
    _counter(
        "xspec_spec_sequence_steps_total",
        "Decode steps summed over running sequences: speculative verified drafts, plain had none to verify.",
        Label("mode", ("speculative", "plain")),
    ),
    _counter("xspec_spec_proposed_tokens_total", "Draft tokens that the drafter produced.", _METHOD),
    _counter("xspec_spec_verified_tokens_total", "Draft tokens that the target model verified.", _METHOD),
    _counter(
        "xspec_spec_accepted_tokens_total",
        "Verified draft tokens that were accepted; bonus tokens excluded.",
        _METHOD,
    ),
    _counter(
        "xspec_spec_emitted_tokens_total",
        "Tokens that sequences gained: accepted plus one per sequence step, minus truncated.",
        _METHOD,
    ),
    _counter(
        "xspec_spec_truncated_tokens_total",
        "Accepted or bonus tokens cut off by a stop or a limit inside the block.",
        _METHOD,
    ),
    _counter(
        "xspec_spec_discarded_tokens_total",
        "Tokens of sequences that had already finished when their step retired; in no other counter.",
        _METHOD,
    ),
    _counter(
        "xspec_spec_position_verified_tokens_total",
        "Draft tokens verified at this position: the denominator of its acceptance.",
        _POSITION,
    ),
    _counter(
        "xspec_spec_position_accepted_tokens_total",
        "Draft tokens accepted at this position, which implies all positions before it.",
        _POSITION,
    ),
    _histogram("xspec_spec_draft_length_tokens", _DRAFTS, "Drafts verified per sequence step."),
    _histogram("xspec_spec_accepted_length_tokens", _DRAFTS, "Drafts accepted per sequence step."),
    _counter("xspec_spec_nan_confidences_total", "Confidences that were not a number and counted as 0."),
)

BUDGET = (
    _gauge(
        "xspec_policy_state",
        "1 for what decides the verification budget now: adaptive, fixed width, flat costs, or off.",
        Label("state", POLICY_STATES),
    ),
    _histogram(
        "xspec_budget_tokens",
        _POWERS,
        "Target rows of a step, anchors and padding included: the budget that was chosen.",
    ),
    _gauge("xspec_budget_current_tokens", "Target rows of the newest step."),
    _counter(
        "xspec_budget_full_width_tokens_total",
        "Target rows that the steps counted in xspec_budget_tokens would have had at full width.",
    ),
    _counter(
        "xspec_budget_decisions_total",
        "Budgets compared with the decision before, as shares of full width; forced: no policy decided.",
        Label("decision", DECISIONS),
    ),
    _counter(
        "xspec_budget_fallbacks_total",
        "Steps that ran at full width because the policy could not decide.",
        Label("reason", FALLBACK_REASONS),
    ),
    _counter("xspec_spec_expected_tokens_total", "Tokens that the policy expected of the steps it decided."),
    _counter(
        "xspec_spec_realized_tokens_total",
        "Tokens that those same steps produced, truncated and discarded ones included.",
    ),
    _counter(
        "xspec_step_predicted_seconds_total",
        "Predicted seconds of steps whose duration was also measured.",
        _TOTAL,
    ),
    _counter(
        "xspec_step_measured_seconds_total",
        "Measured seconds of steps whose duration was also predicted.",
        _TOTAL,
    ),
    _histogram(
        "xspec_step_prediction_error_ratio",
        _ERROR_RATIO,
        "Absolute difference of predicted and measured step seconds, relative to measured.",
    ),
    _gauge(
        "xspec_expected_speedup_ratio",
        "Predicted tokens per second of the newest decision over those of plain decoding; 0 before one.",
    ),
    _gauge(
        "xspec_calibration_timestamp_seconds",
        "Unix time at which the costs in use were measured; 0: never or unknown.",
    ),
    _gauge(
        "xspec_calibration_residual_ratio",
        "Relative error of the fitted step costs over the calibrated points.",
        Label("statistic", ("mean", "max")),
    ),
    _counter(
        "xspec_calibration_runs_total",
        "Calibrations at startup; loaded: a saved bundle took the place of sampling.",
        Label("trigger", ("startup",)),
        Label("result", ("ok", "loaded", "failed")),
    ),
)

ENGINE = (
    _histogram(
        "xspec_step_duration_seconds",
        _STEP,
        "Host seconds per step. schedule: planning and launching; total: between retirements, pipeline full.",
        Label("phase", ("schedule", "total")),
    ),
    _histogram("xspec_step_batch_sequences", _POWERS, "Sequences that sampled in a step."),
    _histogram(
        "xspec_step_tokens",
        _STEP_TOKENS,
        "Rows that the target model computed in a step: prompt rows and target rows.",
    ),
    _counter(
        "xspec_prefill_tokens_total", "Prompt rows computed, rows recomputed after a preemption included."
    ),
    _gauge(
        "xspec_kv_cache_usage_ratio",
        "Used KV pages over all KV pages; cached pages count as free, since they can be taken back.",
    ),
    _gauge(
        "xspec_kv_cache_pages",
        "KV pages by state: used by running sequences, cached prefixes, free.",
        Label("state", ("free", "used", "cached")),
    ),
    _counter("xspec_preemptions_total", "Sequences that gave up their pages to others."),
    _counter(
        "xspec_prefix_cache_lookup_tokens_total",
        "Prompt tokens of admitted sequences that were looked up in the prefix cache.",
    ),
    _counter(
        "xspec_prefix_cache_hit_tokens_total",
        "Prompt tokens of admitted sequences that the prefix cache held.",
    ),
)

LIFECYCLE = (
    _gauge(
        "xspec_server_state",
        "1 for the state of the server, 0 for the others.",
        Label("state", SERVER_STATES),
    ),
    _gauge(
        "xspec_startup_phase_seconds",
        "Seconds that a startup phase took; ready: the whole of it.",
        Label("phase", STARTUP_PHASES),
    ),
    _gauge("xspec_rank_up", "1 while the rank's process lives.", _RANK),
    _gauge(
        "xspec_rank_last_heartbeat_timestamp_seconds",
        "Unix time at which the rank was last heard; it beats every second. 0: not yet.",
        _RANK,
    ),
    _gauge(
        "xspec_build_info",
        "1; versions are in the labels.",
        Label("version", None),
        Label("torch", None),
        Label("device_type", None),
    ),
    _gauge(
        "xspec_config_info",
        "1; the configuration in short is in the labels.",
        Label("draft_method", None),
        Label("max_draft_tokens", None),
        Label("cost_model", None),
        Label("world_size", None),
        Label("config_sha256", None),
    ),
    _counter(
        "xspec_metrics_anomalies_total",
        "Values that a metric refused to record, logged once per metric and kind. Above 0: a bug in xspec.",
        Label("kind", ANOMALIES),
    ),
)

SECTIONS: dict[str, tuple[Family, ...]] = {
    "Requests and tokens": REQUESTS,
    "Latency": LATENCY,
    "Speculation": SPECULATION,
    "Verification budget": BUDGET,
    "Engine and KV cache": ENGINE,
    "Lifecycle": LIFECYCLE,
}
FAMILIES: dict[str, Family] = {family.name: family for section in SECTIONS.values() for family in section}
