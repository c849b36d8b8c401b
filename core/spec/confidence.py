"""Confidence on the host: what the budget policy reads of retired steps. Knows no tokens and no device."""

from __future__ import annotations

import numpy as np


def survival(confidence: np.ndarray) -> np.ndarray:
    """survival[b, j] = prod_{i<=j} confidence[b, i], each clamped to [0, 1], NaN as 0. [B, W], to float64."""
    # Clamping comes before the product, else one value above 1 would hide a doubtful one beside it.
    return np.cumprod(np.clip(np.nan_to_num(confidence.astype(np.float64), nan=0.0), 0.0, 1.0), axis=1)


def count_nan(confidence: np.ndarray) -> int:
    """How many confidences were NaN, for the metric."""
    return int(np.count_nonzero(np.isnan(confidence)))
