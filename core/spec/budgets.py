"""Policies that choose a step's budget on the host. Numbers in, numbers out: no tensors, no requests.

A policy sees the rows of the step (req_idx, generation, draft limit), the tiers that were captured, and whatever it
kept from retired steps. A step with prompt rows ("transient") makes no decision: it runs full width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from core.engine.plan import BudgetChoice, BudgetQuestion, StepResult
from core.spec.cost_table import CostProfiles
from core.spec.verify_budget import FeedbackTable, choose_budget

Tiers = Callable[[int], tuple[int, ...]]  # captured target rows of a request bucket, the last one full width


class BudgetPolicy(Protocol):
    def choose(self, question: BudgetQuestion) -> BudgetChoice:
        """Choose target rows (at least one per sequence) and how deep the step drafts for the next one."""
        ...

    def observe(self, result: StepResult) -> None:
        """Take note of a retired step."""
        ...


class FullWidth:
    """Every draft is verified in every step: fixed-width speculation, and plain decoding at width 0."""

    def __init__(self, tiers: Tiers, *, draft_width: int) -> None:
        self._tiers = tiers
        self._draft_width = draft_width

    def choose(self, question: BudgetQuestion) -> BudgetChoice:
        return BudgetChoice(
            target_rows=self._tiers(question.request_bucket)[-1], propose_depth=self._draft_width
        )

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""


class ForcedRows(FullWidth):
    """The tier that `pick(request_bucket, num_sequences)` names: calibration, and tests with random budgets."""

    def __init__(self, tiers: Tiers, *, draft_width: int, pick: Callable[[int, int], int]) -> None:
        super().__init__(tiers, draft_width=draft_width)
        self._pick = pick

    def choose(self, question: BudgetQuestion) -> BudgetChoice:
        if question.transient:
            return super().choose(question)
        target_rows = self._pick(question.request_bucket, len(question.rows))
        return BudgetChoice(target_rows=target_rows, propose_depth=self._draft_width)


class AdaptiveVerify:
    """The tier with the highest predicted throughput, from lagged survivals and measured costs.

    See docs/design.md, Adaptive target verification.
    """

    def __init__(self, tiers: Tiers, profiles: CostProfiles, *, num_rows: int, draft_width: int) -> None:
        self._tiers = tiers
        self._profiles = profiles
        self._draft_width = draft_width
        self._feedback = FeedbackTable(num_rows, draft_width)
        self._nan_confidences = 0

    def choose(self, question: BudgetQuestion) -> BudgetChoice:
        nan_confidences, self._nan_confidences = self._nan_confidences, 0
        request_bucket, rows = question.request_bucket, question.rows
        if question.transient:
            return BudgetChoice(
                target_rows=self._tiers(request_bucket)[-1],
                propose_depth=self._draft_width,
                fallback="transient",
                nan_confidences=nan_confidences,
            )
        survival, newest = self._feedback.survival_for(
            question.step, [row.req_idx for row in rows], [row.generation for row in rows]
        )
        costs = self._profiles.lookup(question.max_kv_length, request_bucket)
        decision = choose_budget(
            survival=survival,
            draft_limit=np.array([row.draft_limit for row in rows]),
            num_sequences=len(rows),
            request_bucket=request_bucket,
            tiers=self._tiers(request_bucket),
            costs=costs,
        )
        chosen = decision.chosen
        plain = next((c for c in decision.candidates if c.target_rows == request_bucket), None)
        return BudgetChoice(
            target_rows=decision.target_rows,
            propose_depth=self._draft_width,
            decided=chosen is not None,
            fallback=None if chosen is not None else decision.reason,
            expected_tokens=chosen.expected_tokens if chosen else None,
            predicted_seconds=chosen.cost_ms / 1000.0 if chosen else None,
            plain_seconds=plain.cost_ms / 1000.0 if plain else None,
            nan_confidences=nan_confidences,
            feedback_step=newest if newest >= 0 else None,
        )

    def observe(self, result: StepResult) -> None:
        if result.confidence is None:
            return  # a draft pause
        rows = result.plan.sampling_rows
        self._nan_confidences += self._feedback.record(
            result.plan.step,
            [req_idx for req_idx, _ in rows],
            [generation for _, generation in rows],
            result.confidence,
        )
