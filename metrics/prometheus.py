"""The server's metrics: what happened, in the server's words, turned into Prometheus series.

One registry, in the parent process. Ranks send plain counts (metrics.stats.StepStats) with the results of
each step; every interval is measured with one process's clock. Recording never raises: a fault in here is
counted in `xspec_metrics_anomalies_total` and logged once, while tokens keep flowing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, Literal, ParamSpec

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder

from metrics.compat import VllmNames
from metrics.families import HTTP_CODES, ROUTES, Limits
from metrics.series import SeriesStore
from metrics.stats import StepStats

_P = ParamSpec("_P")
_METHODS = ("GET", "POST", "other")


def _never_raises(
    record: Callable[Concatenate[ServerMetrics, _P], None],
) -> Callable[Concatenate[ServerMetrics, _P], None]:
    @functools.wraps(record)
    def recorded(self: ServerMetrics, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            record(self, *args, **kwargs)
        except Exception as error:  # metrics must never stop token delivery
            self.series.anomaly("error", record.__name__, repr(error))

    return recorded


class ServerMetrics:
    """Everything that one server exports. `drafter` is the drafting method (dspark, mtp) or None.

    `routes` are the (route template, method) pairs that the server answers; anything else counts as other.
    `buckets` overrides histogram bounds by metric name. `compat` adds the names of another server.
    """

    def __init__(
        self,
        *,
        model_name: str,
        engine: str = "0",
        max_draft_tokens: int,
        max_model_len: int,
        drafter: str | None = None,
        world_size: int = 1,
        routes: Sequence[tuple[str, str]] = ROUTES,
        buckets: Mapping[str, Sequence[float]] | None = None,
        compat: Literal["none", "vllm"] = "none",
    ) -> None:
        self._method = drafter.lower() if drafter else "none"
        self._max_draft_tokens = max_draft_tokens
        self._in_flight = 0
        self._budget_share = 1.0  # of full width, at the last step that had a choice
        self._routes = frozenset(routes)
        known = [(handler, method, code) for handler, method in dict.fromkeys(routes) for code in HTTP_CODES]
        other = [("other", method, code) for method in _METHODS for code in HTTP_CODES]
        self.series = SeriesStore(
            model_name=model_name,
            engine=engine,
            limits=Limits(
                max_draft_tokens=max_draft_tokens,
                max_model_len=max_model_len,
                method=self._method,
                world_size=world_size,
            ),
            buckets=buckets or {},
            combinations={"xspec_http_requests_total": [*known, *other]},
        )
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self.series)
        if compat == "vllm":
            self.registry.register(VllmNames(self.series, has_drafter=drafter is not None))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.set_state("starting")
        self.set_policy_state("fixed" if drafter else "off")

    # -- requests, as the HTTP side sees them --

    @_never_raises
    def request_started(self) -> None:
        """A request was accepted. Exactly one request_finished follows."""
        self._in_flight += 1
        self.series.set("xspec_requests_in_flight", self._in_flight)

    @_never_raises
    def request_rejected(self, reason: str) -> None:
        """A request was refused before execution; it is neither started nor finished."""
        self.series.add("xspec_requests_rejected_total", 1, reason)

    @_never_raises
    def first_token(self, seconds: float, n: int = 1) -> None:
        """The first output of a request arrived, `seconds` after the request, with n tokens."""
        self.series.observe("xspec_time_to_first_token_seconds", seconds)
        self.series.add("xspec_generation_tokens_total", n)

    @_never_raises
    def tokens(self, interval_seconds: float, n: int) -> None:
        """A later output of a request arrived with n tokens, `interval_seconds` after the output before it.

        n samples of interval / n: their sum is the time from first to last token. An output without tokens is
        no event; the caller must not move its last-token time for it either.
        """
        if n == 0:
            return
        self.series.add("xspec_generation_tokens_total", n)
        self.series.observe("xspec_inter_token_latency_seconds", interval_seconds / n, weight=n)

    @_never_raises
    def output_interval(self, seconds: float) -> None:
        """The gap between two outputs of one request, however many tokens the second one holds."""
        self.series.observe("xspec_output_interval_seconds", seconds)

    @_never_raises
    def request_finished(
        self,
        finish_reason: str,
        *,
        prompt_tokens: int,
        cached_tokens: int = 0,
        generation_tokens: int,
        duration_seconds: float,
        time_per_output_token: float | None = None,
        queue_seconds: float | None = None,
        prefill_seconds: float | None = None,
        decode_seconds: float | None = None,
    ) -> None:
        """A started request ended. `time_per_output_token` is None below two tokens, a phase if unknown."""
        series = self.series
        series.add("xspec_requests_finished_total", 1, finish_reason)
        series.add("xspec_prompt_tokens_total", prompt_tokens - cached_tokens, "computed")
        series.add("xspec_prompt_tokens_total", cached_tokens, "cached")
        series.observe("xspec_request_prompt_tokens", prompt_tokens)
        series.observe("xspec_request_generation_tokens", generation_tokens)
        series.observe("xspec_request_duration_seconds", duration_seconds)
        if time_per_output_token is not None:
            series.observe("xspec_time_per_output_token_seconds", time_per_output_token)
        phases = (("queue", queue_seconds), ("prefill", prefill_seconds), ("decode", decode_seconds))
        for phase, seconds in phases:
            if seconds is not None:
                series.observe("xspec_request_phase_seconds", seconds, phase)
        self._leave()

    @_never_raises
    def http_request(self, handler: str, method: str, code: int) -> None:
        """A response was sent. `handler` is the route template, never the path that the client wrote."""
        status = str(code) if str(code) in HTTP_CODES else "other"
        if (handler, method) not in self._routes:
            handler, method = "other", method if method in _METHODS else "other"
        self.series.add("xspec_http_requests_total", 1, handler, method, status)

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight < 0:
            self.series.anomaly(
                "negative", "xspec_requests_in_flight", "a request finished that never started"
            )
            self._in_flight = 0
        self.series.set("xspec_requests_in_flight", self._in_flight)
        if self._in_flight == 0:
            # An abort may end the last request without a step that would report these again.
            self.series.set("xspec_requests_running", 0)
            self.series.set("xspec_requests_waiting", 0)

    # -- steps, as the engine counted them --

    @_never_raises
    def observe_step(self, stats: StepStats) -> None:
        """Record one retired step."""
        self._check_conservation(stats)
        self._observe_speculation(stats)
        self._observe_budget(stats)
        self._observe_costs(stats)
        self._observe_engine(stats)

    def _check_conservation(self, stats: StepStats) -> None:
        produced = stats.accepted + stats.speculative_sequence_steps + stats.plain_sequence_steps
        laws = (
            ("xspec_spec_emitted_tokens_total", stats.emitted == produced - stats.truncated),
            ("xspec_spec_accepted_tokens_total", stats.accepted <= stats.verified),
            ("xspec_spec_position_verified_tokens_total", sum(stats.position_verified) == stats.verified),
            ("xspec_spec_position_accepted_tokens_total", sum(stats.position_accepted) == stats.accepted),
        )
        for name, holds in laws:
            if not holds:
                self.series.anomaly("conservation", name, f"step {stats.step}: {stats!r}")

    def _observe_speculation(self, stats: StepStats) -> None:
        add, method = self.series.add, self._method
        add("xspec_spec_sequence_steps_total", stats.speculative_sequence_steps, "speculative")
        add("xspec_spec_sequence_steps_total", stats.plain_sequence_steps, "plain")
        add("xspec_spec_proposed_tokens_total", stats.proposed, method)
        add("xspec_spec_verified_tokens_total", stats.verified, method)
        add("xspec_spec_accepted_tokens_total", stats.accepted, method)
        add("xspec_spec_emitted_tokens_total", stats.emitted, method)
        add("xspec_spec_truncated_tokens_total", stats.truncated, method)
        add("xspec_spec_discarded_tokens_total", stats.discarded, method)
        add("xspec_spec_nan_confidences_total", stats.nan_confidences)
        for position, count in enumerate(stats.position_verified):
            add("xspec_spec_position_verified_tokens_total", count, str(position))
        for position, count in enumerate(stats.position_accepted):
            add("xspec_spec_position_accepted_tokens_total", count, str(position))
        observe = self.series.observe
        for length, count in enumerate(stats.draft_length_counts):
            observe("xspec_spec_draft_length_tokens", length, weight=count)
        for length, count in enumerate(stats.accepted_length_counts):
            observe("xspec_spec_accepted_length_tokens", length, weight=count)

    def _observe_budget(self, stats: StepStats) -> None:
        if stats.target_rows == 0:
            return  # prefill alone: there was no budget to choose
        if stats.fallback is not None:
            self.series.add("xspec_budget_fallbacks_total", 1, stats.fallback)
        self.series.observe("xspec_budget_tokens", stats.target_rows)
        self.series.set("xspec_budget_current_tokens", stats.target_rows)
        self.series.add("xspec_budget_full_width_tokens_total", stats.full_width_rows)
        if stats.full_width_rows > stats.request_bucket:
            self.series.add("xspec_budget_decisions_total", 1, self._decision(stats))

    def _decision(self, stats: StepStats) -> str:
        """Compare shares of full width: a change of the request bucket alone neither raises nor lowers.

        A forced step runs what it was given and does not move the share that the next decision is compared
        with. Before the first decision the share is 1: that is what an undecided step runs.
        """
        if not stats.decided:
            return "forced"
        before, now = self._budget_share, stats.target_rows / stats.full_width_rows
        self._budget_share = now
        if stats.target_rows <= stats.request_bucket:
            return "off"
        if now == before:
            return "hold"
        return "raise" if now > before else "lower"

    def _observe_costs(self, stats: StepStats) -> None:
        series = self.series
        predicted, measured, expected = stats.predicted_seconds, stats.measured_seconds, stats.expected_tokens
        if predicted is not None and measured is not None and measured > 0:
            # Both or neither: their quotient is the bias of the cost model.
            series.add("xspec_step_predicted_seconds_total", predicted, "total")
            series.add("xspec_step_measured_seconds_total", measured, "total")
            series.observe("xspec_step_prediction_error_ratio", abs(predicted - measured) / measured)
        if expected is not None:
            series.add("xspec_spec_expected_tokens_total", expected)
            series.add("xspec_spec_realized_tokens_total", stats.emitted + stats.truncated + stats.discarded)
        if expected is not None and predicted and stats.plain_seconds is not None and stats.num_sequences > 0:
            speedup = (expected / predicted) / (stats.num_sequences / stats.plain_seconds)
            series.set("xspec_expected_speedup_ratio", speedup)

    def _observe_engine(self, stats: StepStats) -> None:
        series = self.series
        series.observe("xspec_step_duration_seconds", stats.schedule_seconds, "schedule")
        if stats.measured_seconds is not None:
            series.observe("xspec_step_duration_seconds", stats.measured_seconds, "total")
        series.observe("xspec_step_batch_sequences", stats.num_sequences)
        series.observe("xspec_step_tokens", stats.prefill_tokens + stats.target_rows)
        series.add("xspec_prefill_tokens_total", stats.prefill_tokens)
        series.add("xspec_prefix_cache_lookup_tokens_total", stats.cache_lookup_tokens)
        series.add("xspec_prefix_cache_hit_tokens_total", stats.cached_tokens)
        series.add("xspec_preemptions_total", stats.preemptions)
        series.set("xspec_requests_running", stats.running)
        series.set("xspec_requests_waiting", stats.waiting)
        pages = {"used": stats.pages_used, "cached": stats.pages_cached, "free": stats.pages_free}
        for state, count in pages.items():
            series.set("xspec_kv_cache_pages", count, state)
        total = sum(pages.values())
        series.set("xspec_kv_cache_usage_ratio", stats.pages_used / total if total else 0.0)

    def speculation(self) -> dict[str, float | None]:
        """The speculation counters so far; acceptance length (bonus included) is null before the first step."""

        def total(name: str) -> float:
            return sum(self.series.scalars[f"xspec_spec_{name}_total"].values())

        names = ("proposed_tokens", "verified_tokens", "accepted_tokens", "emitted_tokens", "sequence_steps")
        totals = {name: total(name) for name in names}
        steps = totals["sequence_steps"]
        return {**totals, "acceptance_length": totals["emitted_tokens"] / steps if steps else None}

    # -- life of the server --

    @_never_raises
    def set_state(self, state: str) -> None:
        """One of starting, loading, warmup, calibrating, ready, draining, failed."""
        self.series.set_only("xspec_server_state", state)

    @_never_raises
    def set_policy_state(self, state: str) -> None:
        """One of adaptive, fixed, flat, off."""
        self.series.set_only("xspec_policy_state", state)

    @_never_raises
    def set_phase_seconds(self, phase: str, seconds: float) -> None:
        """How long a startup phase took: load, kv, warmup, calibrate; `ready` is the whole startup."""
        self.series.set("xspec_startup_phase_seconds", seconds, phase)

    @_never_raises
    def set_calibration(
        self,
        *,
        result: str = "ok",
        timestamp_seconds: float | None = None,
        mean_relative_error: float | None = None,
        max_relative_error: float | None = None,
    ) -> None:
        """Calibration ended: result is ok (sampled now), loaded (a saved bundle) or failed."""
        self.series.add("xspec_calibration_runs_total", 1, "startup", result)
        if timestamp_seconds is not None:
            self.series.set("xspec_calibration_timestamp_seconds", timestamp_seconds)
        if mean_relative_error is not None:
            self.series.set("xspec_calibration_residual_ratio", mean_relative_error, "mean")
        if max_relative_error is not None:
            self.series.set("xspec_calibration_residual_ratio", max_relative_error, "max")

    @_never_raises
    def set_info(
        self,
        *,
        version: str,
        torch: str = "",
        device_type: str = "",
        cost_model: str = "",
        world_size: int = 1,
        config_sha256: str = "",
    ) -> None:
        """Versions and the configuration in short; call it again when more is known."""
        self.series.replace_info("xspec_build_info", (version, torch, device_type))
        config = (self._method, str(self._max_draft_tokens), cost_model, str(world_size), config_sha256)
        self.series.replace_info("xspec_config_info", config)

    @_never_raises
    def set_rank_up(self, rank: int, up: bool) -> None:
        self.series.set("xspec_rank_up", float(up), str(rank))

    @_never_raises
    def rank_heard(self, rank: int) -> None:
        """A heartbeat of the rank arrived now."""
        self.series.set("xspec_rank_last_heartbeat_timestamp_seconds", time.time(), str(rank))

    def render(self, accept_header: str | None) -> tuple[str, bytes]:
        """The exposition: (content type, body) in the format that the scraper prefers."""
        encode, content_type = choose_encoder(accept_header or "")
        return content_type, encode(self.registry)
