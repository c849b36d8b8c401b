"""What somebody on duty looks at first: traffic, latency, saturation, life of the server."""

from __future__ import annotations

from dashboards.panels import (
    Json,
    Panel,
    Query,
    Row,
    choice,
    dashboard,
    mean,
    quantile,
    ratio,
    series,
    share_below,
    stat,
    total,
)

_TTFT = "xspec_time_to_first_token_seconds"
_FAILED = 'code=~"5.."'
_TPOT = "xspec_time_per_output_token_seconds"

_SUMMARY = Row(
    "Summary",
    [
        stat(
            "Requests/s", total("xspec_requests_finished_total"), "Finished requests, aborted ones included."
        ),
        stat("Output tokens/s", total("xspec_generation_tokens_total"), "Tokens generated for requests."),
        stat("TTFT p95", quantile(0.95, _TTFT), "Arrival to first token.", "s"),
        stat("TPOT p95", quantile(0.95, _TPOT), "Per request: time per token after the first.", "s"),
        stat(
            "TTFT within target",
            share_below(_TTFT, "$ttft_target"),
            "Share within the target above.",
            "percentunit",
        ),
        stat(
            "TPOT within target",
            share_below(_TPOT, "$tpot_target"),
            "Share within the target above.",
            "percentunit",
        ),
    ],
)

_TRAFFIC = Row(
    "Traffic",
    [
        Panel(
            title="Requests by outcome",
            what="Finished requests by reason, and requests refused before execution.",
            unit="reqps",
            width=6,
            queries=[
                Query(total("xspec_requests_finished_total", by="finish_reason"), "{{finish_reason}}"),
                Query(total("xspec_requests_rejected_total", by="reason"), "rejected: {{reason}}"),
            ],
        ),
        Panel(
            title="Tokens per second",
            what="Prompt rows computed, also again after a preemption; cached prompt tokens; output.",
            width=6,
            queries=[
                Query(total("xspec_prefill_tokens_total"), "prefill"),
                Query(total("xspec_prefix_cache_hit_tokens_total"), "from the prefix cache"),
                Query(total("xspec_generation_tokens_total"), "output"),
            ],
        ),
        Panel(
            title="HTTP responses",
            what="Responses by status code.",
            unit="reqps",
            width=6,
            queries=[Query(total("xspec_http_requests_total", by="code") + " > 0", "{{code}}")],
        ),
        Panel(
            title="HTTP server errors",
            what="Share of responses with a code of 500 or above.",
            unit="percentunit",
            maximum=1,
            width=6,
            queries=[
                Query(
                    ratio(total("xspec_http_requests_total", _FAILED), total("xspec_http_requests_total")),
                    "5xx",
                )
            ],
        ),
    ],
)

_LATENCY = Row(
    "Latency",
    [
        Panel(
            title="Time to first token",
            what="Arrival, before tokenization, to the first token.",
            unit="s",
            queries=[Query(quantile(q, _TTFT), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)],
        ),
        Panel(
            title="Time per output token",
            what="Per finished request of two tokens or more.",
            unit="s",
            queries=[Query(quantile(q, _TPOT), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)],
        ),
        Panel(
            title="Request duration and its phases",
            what="Mean duration of finished requests, and the mean of the phases that were measured.",
            unit="s",
            queries=[
                Query(mean("xspec_request_duration_seconds"), "whole request"),
                Query(mean("xspec_request_phase_seconds", by="phase"), "{{phase}}"),
            ],
        ),
    ],
)

_SATURATION = Row(
    "Saturation",
    [
        Panel(
            title="Requests in the server",
            what="Accepted and unfinished; of those, in the batch and waiting for it.",
            queries=[
                Query(f"sum ({series('xspec_requests_in_flight')})", "in flight"),
                Query(f"sum ({series('xspec_requests_running')})", "running"),
                Query(f"sum ({series('xspec_requests_waiting')})", "waiting"),
            ],
        ),
        Panel(
            title="KV pages",
            what="Pages of running sequences, cached prefixes (can be taken back) and free pages.",
            stacked=True,
            queries=[Query(f"sum by (state) ({series('xspec_kv_cache_pages')})", "{{state}}")],
        ),
        Panel(
            title="KV usage and prefix cache hits",
            what="Share of pages in use; share of looked-up prompt tokens that the prefix cache held.",
            unit="percentunit",
            maximum=1,
            queries=[
                Query(
                    f"max by (instance, engine) ({series('xspec_kv_cache_usage_ratio')})",
                    "usage {{instance}}",
                ),
                Query(
                    ratio(
                        total("xspec_prefix_cache_hit_tokens_total"),
                        total("xspec_prefix_cache_lookup_tokens_total"),
                    ),
                    "prefix cache hits",
                ),
            ],
        ),
        Panel(
            title="Preemptions",
            what="Sequences per second that gave up their pages to others.",
            width=6,
            queries=[Query(total("xspec_preemptions_total"), "preemptions/s")],
        ),
        Panel(
            title="Step time",
            what="Planning and launching on the host; interval between results while the pipeline is full.",
            unit="s",
            width=6,
            queries=[
                Query(quantile(0.5, "xspec_step_duration_seconds", 'phase="total"'), "total p50"),
                Query(quantile(0.95, "xspec_step_duration_seconds", 'phase="total"'), "total p95"),
                Query(quantile(0.95, "xspec_step_duration_seconds", 'phase="schedule"'), "schedule p95"),
            ],
        ),
        Panel(
            title="Step size",
            what="Mean sequences per step and mean rows (prompt and verify) per step.",
            width=6,
            queries=[
                Query(mean("xspec_step_batch_sequences"), "sequences"),
                Query(mean("xspec_step_tokens"), "rows"),
            ],
        ),
        Panel(
            title="Server process",
            what="The parent process: HTTP, tokenizer, metrics. Ranks are not in here.",
            unit="percentunit",
            width=6,
            queries=[
                Query(
                    'rate(process_cpu_seconds_total{job=~"$job", instance=~"$instance"}[$__rate_interval])',
                    "CPU cores {{instance}}",
                )
            ],
        ),
    ],
)

_LIFE = Row(
    "Life of the server",
    [
        Panel(
            title="Server state",
            what="The state that holds is 1.",
            kind="state-timeline",
            queries=[Query(f"max by (state) ({series('xspec_server_state')}) > 0", "{{state}}")],
        ),
        Panel(
            title="Ranks alive",
            what="1 while a rank's process lives.",
            kind="state-timeline",
            width=6,
            queries=[
                Query(f"min by (instance, rank) ({series('xspec_rank_up')})", "{{instance}} rank {{rank}}")
            ],
        ),
        Panel(
            title="Startup phases",
            what="Seconds per phase; ready is the whole startup.",
            unit="s",
            width=6,
            queries=[
                Query(f"max by (phase) ({series('xspec_startup_phase_seconds')})", "{{phase}}"),
            ],
        ),
        stat(
            "Anomalies",
            f"sum (increase({series('xspec_metrics_anomalies_total')}[$__range]))",
            "Values that a metric refused to record. Above 0: a bug in xspec, with a warning in the log.",
        ),
    ],
)


def build() -> Json:
    targets = [
        choice("ttft_target", "TTFT target (s)", ("0.1", "0.25", "0.5", "1.0", "2.5", "5.0"), "1.0"),
        choice("tpot_target", "TPOT target (s)", ("0.01", "0.025", "0.05", "0.1", "0.2", "0.5"), "0.05"),
    ]
    rows = [_SUMMARY, _TRAFFIC, _LATENCY, _SATURATION, _LIFE]
    return dashboard("xspec-overview", "xspec / Overview", "Traffic, latency and saturation.", rows, targets)
