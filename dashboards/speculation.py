"""What speculation gains, and what the budget policy believes, decides and gets."""

from __future__ import annotations

from dashboards.panels import (
    Json,
    Panel,
    Query,
    Row,
    dashboard,
    heatmap,
    mean,
    quantile,
    ratio,
    series,
    stat,
    total,
)

_STEPS = total("xspec_spec_sequence_steps_total")
_EMITTED = total("xspec_spec_emitted_tokens_total")
_ACCEPTED = total("xspec_spec_accepted_tokens_total")
_VERIFIED = total("xspec_spec_verified_tokens_total")
_PROPOSED = total("xspec_spec_proposed_tokens_total")
_PREDICTED = total("xspec_step_predicted_seconds_total")
_MEASURED = total("xspec_step_measured_seconds_total")
_COMPARED = total("xspec_step_prediction_error_ratio_count")
_EXPECTED = total("xspec_spec_expected_tokens_total")
_REALIZED = total("xspec_spec_realized_tokens_total")
_BUDGET = total("xspec_budget_tokens_sum")

_SUMMARY = Row(
    "Summary",
    [
        stat("Acceptance length", ratio(_EMITTED, _STEPS), "Tokens per sequence and step, bonus included."),
        stat(
            "Accepted / verified", ratio(_ACCEPTED, _VERIFIED), "Of the drafts the target saw.", "percentunit"
        ),
        stat(
            "Verified / proposed", ratio(_VERIFIED, _PROPOSED), "What the budget let through.", "percentunit"
        ),
        stat(
            "Output from drafts",
            ratio(_ACCEPTED, _EMITTED),
            "Accepted drafts over emitted tokens; a stop inside a block cuts a few.",
            "percentunit",
        ),
        stat(
            "Budget / full width",
            ratio(_BUDGET, total("xspec_budget_full_width_tokens_total")),
            "Target rows that ran over those that verifying every draft would have taken.",
            "percentunit",
        ),
        stat(
            "Expected speedup",
            f"avg ({series('xspec_expected_speedup_ratio')} > 0)",
            "Predicted tokens per second of the newest decision over those of plain decoding.",
        ),
    ],
)

_FLOW = Row(
    "Tokens",
    [
        Panel(
            title="From proposed to emitted",
            what="Drafts produced, verified, accepted, rejected; tokens emitted, cut by a stop, thrown away.",
            width=12,
            queries=[
                Query(_PROPOSED, "proposed"),
                Query(_VERIFIED, "verified"),
                Query(_ACCEPTED, "accepted"),
                Query(f"{_VERIFIED} - {_ACCEPTED}", "rejected"),
                Query(_EMITTED, "emitted"),
                Query(total("xspec_spec_truncated_tokens_total"), "truncated"),
                Query(total("xspec_spec_discarded_tokens_total"), "discarded"),
            ],
        ),
        Panel(
            title="Prefix acceptance by position",
            what="Where a position was verified: the share with it and all positions before it accepted.",
            unit="percentunit",
            maximum=1,
            width=12,
            queries=[
                Query(
                    ratio(
                        total("xspec_spec_position_accepted_tokens_total", by="position"),
                        total("xspec_spec_position_verified_tokens_total", by="position"),
                    ),
                    "position {{position}}",
                )
            ],
        ),
        heatmap("Drafts verified", "xspec_spec_draft_length_tokens", "Per sequence step."),
        heatmap("Drafts accepted", "xspec_spec_accepted_length_tokens", "Per sequence step."),
        Panel(
            title="Speculative and plain steps",
            what="Sequence steps that verified drafts, and those that had none to verify.",
            stacked=True,
            queries=[Query(total("xspec_spec_sequence_steps_total", by="mode"), "{{mode}}")],
        ),
        Panel(
            title="Tokens per step",
            what="Emitted tokens over sequence steps, and over whole steps of the batch.",
            queries=[
                Query(ratio(_EMITTED, _STEPS), "per sequence step"),
                Query(ratio(_EMITTED, total("xspec_step_batch_sequences_count")), "per step"),
            ],
        ),
        Panel(
            title="Gap per token and per output",
            what="The output of a verified block holds several tokens, so these differ by tokens per output.",
            unit="s",
            queries=[
                Query(mean("xspec_inter_token_latency_seconds"), "per token"),
                Query(mean("xspec_output_interval_seconds"), "per output"),
                Query(quantile(0.95, "xspec_output_interval_seconds"), "per output p95"),
            ],
        ),
    ],
)

_DECISIONS = Row(
    "Budget decisions",
    [
        Panel(
            title="What decides the budget",
            what="adaptive, fixed width, flat costs (every draft looks free), or off.",
            kind="state-timeline",
            height=6,
            width=12,
            queries=[Query(f"max by (state) ({series('xspec_policy_state')}) > 0", "{{state}}")],
        ),
        Panel(
            title="Why the policy could not decide",
            what="Steps at full width: no costs for the shape, a prefill or another request set, a pause.",
            height=6,
            width=12,
            queries=[Query(total("xspec_budget_fallbacks_total", by="reason"), "{{reason}}")],
        ),
        heatmap("Chosen budget", "xspec_budget_tokens", "Target rows per step."),
        Panel(
            title="Budget and batch",
            what="Mean target rows per step, rows at full width, sequences. Budgets should follow load.",
            width=12,
            queries=[
                Query(mean("xspec_budget_tokens"), "budget"),
                Query(
                    ratio(total("xspec_budget_full_width_tokens_total"), total("xspec_budget_tokens_count")),
                    "full width",
                ),
                Query(mean("xspec_step_batch_sequences"), "sequences"),
            ],
        ),
        Panel(
            title="Decisions",
            what="Budgets against the decision before, as shares of full width.",
            stacked=True,
            queries=[Query(total("xspec_budget_decisions_total", by="decision"), "{{decision}}")],
        ),
        Panel(
            title="Expected and realized tokens",
            what="Tokens per second: expected of the steps that the policy decided, and produced by them.",
            queries=[Query(_EXPECTED, "expected"), Query(_REALIZED, "realized")],
        ),
        Panel(
            title="Expected and realized speedup",
            what="Over plain decoding at its predicted cost. Realized: corrected by tokens and seconds.",
            queries=[
                Query(f"avg ({series('xspec_expected_speedup_ratio')} > 0)", "expected"),
                Query(
                    f"avg ({series('xspec_expected_speedup_ratio')} > 0) * "
                    f"({ratio(_REALIZED, _EXPECTED)}) * ({ratio(_PREDICTED, _MEASURED)})",
                    "realized",
                ),
            ],
        ),
    ],
)

_COSTS = Row(
    "Step costs",
    [
        Panel(
            title="Predicted and measured step seconds",
            what="Means of the steps that have both. A lasting gap: the costs do not fit this machine now.",
            unit="s",
            queries=[
                Query(ratio(_PREDICTED, _COMPARED), "predicted"),
                Query(ratio(_MEASURED, _COMPARED), "measured"),
            ],
        ),
        Panel(
            title="Error of predicted step seconds",
            what="Bias of the sum, and quantiles of the absolute relative error of single steps.",
            unit="percentunit",
            minimum=None,
            queries=[
                Query(f"{ratio(_PREDICTED, _MEASURED)} - 1", "bias"),
                Query(quantile(0.5, "xspec_step_prediction_error_ratio"), "error p50"),
                Query(quantile(0.95, "xspec_step_prediction_error_ratio"), "error p95"),
            ],
        ),
        Panel(
            title="Fit of the calibration",
            what="Relative error of the fitted costs over the calibrated points.",
            unit="percentunit",
            queries=[
                Query(f"max by (statistic) ({series('xspec_calibration_residual_ratio')})", "{{statistic}}")
            ],
        ),
        stat(
            "Age of the costs",
            f"time() - max ({series('xspec_calibration_timestamp_seconds')} > 0)",
            "Since they were measured.",
            "s",
        ),
        stat(
            "Calibrations",
            f"sum (increase({series('xspec_calibration_runs_total')}[$__range]))",
            "Sampled, loaded or failed in the time shown.",
        ),
        stat(
            "NaN confidences",
            f"sum (increase({series('xspec_spec_nan_confidences_total')}[$__range]))",
            "Counted as 0 by the policy; should not happen.",
        ),
    ],
)


def build() -> Json:
    rows = [_SUMMARY, _FLOW, _DECISIONS, _COSTS]
    what = "Acceptance, verification budgets and step costs."
    return dashboard("xspec-speculation", "xspec / Speculation", what, rows)
