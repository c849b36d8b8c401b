"""Survival on the host, and the argmax that drafting and greedy sampling share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.layers.linear import vocab_argmax
from core.spec.confidence import count_nan, survival


def test_survival_clamps_before_the_product() -> None:
    confidence = np.array([[0.5, 2.0, 0.5], [-1.0, 1.0, 1.0], [1.0, np.nan, 1.0]], dtype=np.float32)
    assert survival(confidence).tolist() == [[0.5, 0.5, 0.25], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert count_nan(confidence) == 1
    assert survival(np.ones((0, 7), dtype=np.float32)).shape == (0, 7)


@pytest.mark.parametrize("vocab_size", [96, 97, 1024, 1536])
def test_vocab_argmax_takes_the_first_of_equal_entries(vocab_size: int) -> None:
    logits = torch.randint(0, 9, (40, vocab_size), generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(vocab_argmax(logits), logits.argmax(-1))
    assert (vocab_argmax(torch.full((2, vocab_size), float("nan"))) < vocab_size).all()
