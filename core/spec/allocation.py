"""Which drafts a step verifies: prefix allocation over the current confidences.

See docs/design.md, Adaptive target verification. `allocate` runs on the device inside the step;
`allocate_host` is the same rule in numpy, for tests and `xspec explain`. Both multiply float32 confidences
left to right, one position at a time, so that they agree to the last bit: a fused cumulative product may
round differently and break ties another way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def survival(confidence: torch.Tensor) -> torch.Tensor:
    """survival[b, j] = prod over i <= j of clamp(confidence[b, i], 0, 1), NaN as 0. [B, W] to float32."""
    clamped = confidence.float().nan_to_num(nan=0.0, posinf=1.0, neginf=0.0).clamp(0.0, 1.0)
    products = clamped.clone()
    for position in range(1, clamped.shape[1]):
        products[:, position] *= products[:, position - 1]
    return products


def allocate(
    survival: torch.Tensor, draft_limit: torch.Tensor, num_drafts_budget: torch.Tensor | int
) -> torch.Tensor:
    """Return [B] int64 verify lengths: the global top `num_drafts_budget` survivals within the limits.

    survival: [B, W] float32, non-increasing along a row. draft_limit: [B] int64 (0 for padding sequences).
    The budget is G - N of the plan, a tensor of one element inside a captured graph. Ties go to the earlier
    position, then to the smaller row, so a choice is always a prefix. Shapes depend on B and W only and
    nothing is read back.
    """
    import torch

    num_rows, width = survival.shape
    within = torch.arange(width, device=survival.device)[:, None] < draft_limit[None, :]
    # [W, B]: position-major, so that a stable sort breaks ties as promised. Beyond the limit: below every
    # survival, taken only once all others are, and masked out then.
    ranked = survival.t().masked_fill(~within, -1.0).reshape(-1)
    order = torch.argsort(ranked, descending=True, stable=True)
    taken = torch.arange(ranked.shape[0], device=survival.device) < num_drafts_budget
    chosen = torch.empty_like(taken).scatter_(0, order, taken)
    return (chosen.view(width, num_rows) & within).sum(dim=0)


def survival_host(confidence: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """The numpy twin of `survival`: the same float32 products in the same order."""
    clamped = np.clip(np.nan_to_num(np.asarray(confidence, dtype=np.float32), nan=0.0), 0.0, 1.0)
    return np.multiply.accumulate(clamped, axis=1, dtype=np.float32)


def allocate_host(
    confidence: npt.NDArray[np.floating], draft_limit: npt.NDArray[np.integer], target_rows: int
) -> npt.NDArray[np.int64]:
    """Return [N] int64 verify lengths for `target_rows` = G rows over N sequences.

    confidence: [N, W]; draft_limit: [N]. Sorts (survival descending, position, row) and takes min(G - N, D).
    """
    num_rows, width = confidence.shape
    scores = survival_host(confidence)
    within = np.arange(width)[:, None] < draft_limit[None, :]  # [W, N]
    positions, rows = np.nonzero(within)
    order = np.lexsort((rows, positions, -scores.T[within]))
    taken = rows[order[: max(0, target_rows - num_rows)]]
    return np.bincount(taken, minlength=num_rows).astype(np.int64)
