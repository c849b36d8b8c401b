"""Plain facts that the engine reports and metrics consume: numerators and denominators, never ratios.

A leaf: imports nothing of core.
"""

from __future__ import annotations

import msgspec


class StepStats(msgspec.Struct, kw_only=True):
    """One retired decode or prefill step of one engine, as counts. Draft positions are 0-based.

    Tokens of sequences that had already finished count in `discarded` and in nothing else of speculation.
    """

    step: int
    num_sequences: int  # sequences that sampled
    prefill_tokens: int  # prompt rows computed
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache by sequences admitted in this step
    cache_lookup_tokens: int = 0  # prompt tokens of those sequences, cached or not
    request_bucket: int = 0  # physical request capacity that ran
    target_rows: int = 0  # physical verify rows that ran (the chosen budget)
    full_width_rows: int = 0  # target_rows at full width for that bucket
    transient: bool = False  # prompt rows inside: no budget decision
    decided: bool = False  # whether a budget policy chose target_rows (False: forced or fixed)
    fallback: str | None = None  # why a deciding policy ran full width: no_profile, transient, pause
    # speculation, summed over sequences that were still running
    speculative_sequence_steps: int = 0
    plain_sequence_steps: int = 0
    proposed: int = 0  # drafts produced by the drafter in this step, for the next one
    verified: int = 0
    accepted: int = 0
    emitted: int = 0  # after stop truncation, bonus included
    truncated: int = 0  # accepted or bonus tokens cut off by a stop or a limit inside the block
    discarded: int = 0  # tokens of sequences that had already finished
    position_verified: list[int] = []
    position_accepted: list[int] = []
    draft_length_counts: list[int] = []  # [K+1] sequences by number of verified drafts
    accepted_length_counts: list[int] = []  # [K+1] sequences by number of accepted drafts
    nan_confidences: int = 0
    # predictions of the budget controller and what happened
    expected_tokens: float | None = None
    predicted_seconds: float | None = None
    plain_seconds: float | None = None  # predicted step seconds at target_rows = request_bucket
    measured_seconds: float | None = None  # between consecutive retirements while the pipeline is full
    schedule_seconds: float = 0.0  # host time spent planning and launching
    # gauges after the step
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_free: int = 0
    preemptions: int = 0  # in this step
