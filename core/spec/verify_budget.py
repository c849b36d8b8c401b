"""How many physical rows a step verifies: the host side of adaptive target verification.

See docs/design.md, Adaptive target verification. Pure numpy. Sees only feedback that retired two steps ago,
never the tokens it judges: that lag keeps the target distribution exact (DSpark paper, section 3.2.2), so the
global argmax over tiers is lossless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.spec.confidence import count_nan, survival
from core.spec.costs import CostModel

TIE_TOLERANCE = 1e-12  # relative; closer throughputs are a tie and go to fewer rows
LAG = 2  # the plan of step n uses results of steps <= n - LAG, with one or two slots in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCandidate:
    """One tier and what the policy predicted for it."""

    target_rows: int
    expected_tokens: float  # tau: anchors plus admitted survivals
    cost_ms: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetDecision:
    """The chosen tier. `reason` is "best", or "no_profile": no cost covers the step and full width runs."""

    target_rows: int
    candidates: tuple[BudgetCandidate, ...]  # ascending by target_rows
    reason: str

    @property
    def chosen(self) -> BudgetCandidate | None:
        return next((c for c in self.candidates if c.target_rows == self.target_rows), None)


def choose_budget(
    *,
    survival: npt.NDArray[np.floating],
    draft_limit: npt.NDArray[np.integer],
    num_sequences: int,
    request_bucket: int,
    tiers: Sequence[int],
    costs: CostModel | None,
) -> BudgetDecision:
    """Choose target_rows G = argmax (N + sum of the top min(G - N, D) survivals) / cost_ms(Bcap, G).

    survival: [N, W] lagged, 1.0 where drafts were never retired. draft_limit: [N], D is its sum. tiers: the
    captured row counts of `request_bucket`, ascending. Costs are a staircase, so every tier is looked at;
    tiers below N or without a cost are no candidates. Without any candidate the answer is full width, the
    last tier.
    """
    assert survival.shape[0] == num_sequences == draft_limit.shape[0], (survival.shape, num_sequences)
    known = [] if costs is None else [g for g in tiers if g >= num_sequences and costs.has(request_bucket, g)]
    if costs is None or not known:
        assert tiers[-1] >= num_sequences, (tiers, num_sequences)
        return BudgetDecision(target_rows=tiers[-1], candidates=(), reason="no_profile")

    admissible = survival[np.arange(survival.shape[1]) < draft_limit[:, None]]
    total = admissible.size  # D
    num_drafts = [min(rows - num_sequences, total) for rows in known]
    # Only the sums of the largest k are needed: partitioning at each k is four times cheaper than a sort.
    cuts = sorted({total - k for k in num_drafts if 0 < k < total})
    ascending = np.partition(admissible, cuts) if cuts else admissible
    candidates = []
    best: BudgetCandidate | None = None
    for rows, k in zip(known, num_drafts, strict=True):
        expected = num_sequences + float(ascending[total - k :].sum(dtype=np.float64))
        cost_ms = costs.cost_ms(request_bucket, rows)
        candidate = BudgetCandidate(
            target_rows=rows,
            expected_tokens=expected,
            cost_ms=cost_ms,
            tokens_per_second=1000.0 * expected / cost_ms,
        )
        candidates.append(candidate)
        if best is None or candidate.tokens_per_second > best.tokens_per_second * (1.0 + TIE_TOLERANCE):
            best = candidate
    assert best is not None
    return BudgetDecision(target_rows=best.target_rows, candidates=tuple(candidates), reason="best")


class FeedbackTable:
    """Retired confidences per device row: the newest two of each, so that step n - 1 can be ignored.

    A plan for step n reads the newest entry with step <= n - 2 of the sequence's present generation. At most
    one retired step can be newer than that, hence a ring of two. Allocated once; nothing grows while serving.
    """

    def __init__(self, num_rows: int, draft_width: int) -> None:
        self._step = np.full((num_rows, 2), -1, dtype=np.int64)  # -1: empty
        self._generation = np.zeros((num_rows, 2), dtype=np.int64)
        self._survival = np.ones((num_rows, 2, draft_width), dtype=np.float64)

    def record(
        self,
        step: int,
        req_idx: npt.ArrayLike,
        generation: npt.ArrayLike,
        confidence: npt.ArrayLike,
    ) -> int:
        """Store what step `step` retired and return how many confidences were NaN.

        req_idx, generation: [M] (or scalars); confidence: [M, W] (or [W]) of the drafts that the step
        proposed. Steps arrive in ascending order per row.
        """
        rows = np.atleast_1d(np.asarray(req_idx, dtype=np.int64))
        values = np.atleast_2d(np.asarray(confidence, dtype=np.float64))
        assert (self._step[rows].max(axis=1, initial=-1) < step).all(), (step, rows, self._step[rows])
        oldest = self._step[rows].argmin(axis=1)
        self._step[rows, oldest] = step
        self._generation[rows, oldest] = np.atleast_1d(np.asarray(generation, dtype=np.int64))
        self._survival[rows, oldest] = survival(values)
        return count_nan(values)

    def survival_for(
        self, plan_step: int, req_idx: npt.ArrayLike, generation: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.float64], int]:
        """Return ([N, W] lagged survivals for the plan of `plan_step`, newest step used or -1).

        A row without usable feedback (never retired, another generation) is all ones.
        """
        rows = np.asarray(req_idx, dtype=np.int64)
        steps = self._step[rows]  # [N, 2]
        usable = (steps >= 0) & (steps <= plan_step - LAG)
        usable &= self._generation[rows] == np.asarray(generation, dtype=np.int64)[:, None]
        usable_steps = np.where(usable, steps, -1)
        newest = usable_steps.argmax(axis=1)
        lagged = self._survival[rows, newest]
        lagged[~usable.any(axis=1)] = 1.0
        newest_step = int(usable_steps.max(initial=-1))
        assert newest_step <= plan_step - LAG or newest_step == -1, (newest_step, plan_step)
        return lagged, newest_step
