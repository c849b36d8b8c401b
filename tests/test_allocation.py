"""Prefix allocation: the device function, the host twin and a direct statement of the rule agree exactly."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from core.spec.allocation import allocate, allocate_host, survival, survival_host

Confidence = npt.NDArray[np.float32]


def by_the_rule(scores: Confidence, limits: list[int], budget: int) -> list[int]:
    """Take the best draft left, again and again: highest survival, earliest position, smallest row."""
    taken = [0] * len(limits)
    left = [(-float(scores[r, j]), j, r) for r, limit in enumerate(limits) for j in range(limit)]
    for _, _, row in sorted(left)[:budget]:
        taken[row] += 1
    return taken


def on_device(confidence: Confidence, limits: list[int], budget: int | torch.Tensor) -> list[int]:
    lengths: list[int] = allocate(
        survival(torch.from_numpy(confidence)), torch.tensor(limits), budget
    ).tolist()
    return lengths


def random_case(rng: np.random.Generator) -> tuple[Confidence, list[int], int]:
    """What breaks allocators: exact ties, NaN, zeros, values beyond [0, 1], limits, padding, extremes."""
    rows, width = int(rng.integers(1, 17)), int(rng.choice([1, 2, 5, 7]))
    shape = (rows, width)
    style = rng.integers(0, 5)
    confidence: npt.NDArray[np.floating]
    if style == 0:
        confidence = rng.random(shape)
    elif style == 1:  # powers of two: products tie exactly, also across positions
        confidence = 0.5 ** rng.integers(0, 3, shape)
    elif style == 2:  # few values: ties that depend on rounding
        confidence = rng.choice([0.9, 0.3, 0.81, 0.7], shape)
    elif style == 3:
        confidence = rng.choice([0.0, 1.0, np.nan, -0.5, 1.5, np.inf, -np.inf, -0.0], shape)
    else:
        confidence = rng.choice([1e-20, 1e-38, 1.0, 0.999], shape)
    limits = rng.integers(0, width + 1, rows) if rng.random() < 0.7 else np.full(rows, width)
    return confidence.astype(np.float32), limits.tolist(), int(rng.integers(0, rows * width + 3))


def test_device_host_and_rule_agree_on_random_cases() -> None:
    rng = np.random.default_rng(20260101)
    for _ in range(10_000):
        confidence, limits, budget = random_case(rng)
        host = allocate_host(confidence, np.array(limits), len(limits) + budget).tolist()
        assert host == by_the_rule(survival_host(confidence), limits, budget)
        assert host == on_device(confidence, limits, budget), (confidence, limits, budget)
        assert sum(host) == min(budget, sum(limits))
        assert all(0 <= n <= limit for n, limit in zip(host, limits, strict=True))


def test_survival_is_equal_to_the_last_bit_on_device_and_host() -> None:
    rng = np.random.default_rng(7)
    confidence = rng.random((512, 7)).astype(np.float32)
    confidence[rng.random((512, 7)) < 0.1] = np.nan
    on_torch = survival(torch.from_numpy(confidence)).numpy()
    assert on_torch.dtype == np.float32
    assert np.array_equal(on_torch, survival_host(confidence))


def test_chosen_prefixes_are_a_best_subset() -> None:
    """No other way to spend the budget on prefixes expects more tokens (brute force over all of them)."""
    rng = np.random.default_rng(3)
    for _ in range(100):
        confidence = rng.random((3, 3)).astype(np.float32)
        limits = rng.integers(0, 4, 3).tolist()
        budget = int(rng.integers(0, 10))
        scores = survival_host(confidence).astype(np.float64)

        def value(lengths: tuple[int, ...], scores: npt.NDArray[np.float64] = scores) -> float:
            return math.fsum(scores[row, :n].sum() for row, n in enumerate(lengths))

        best = max(
            value(lengths)
            for lengths in product(*(range(limit + 1) for limit in limits))
            if sum(lengths) <= budget
        )
        assert value(tuple(on_device(confidence, limits, budget))) == pytest.approx(best, rel=1e-9)


def test_ties_go_to_the_earlier_position_then_to_the_smaller_row() -> None:
    ones = np.ones((3, 4), dtype=np.float32)
    assert on_device(ones, [4, 4, 4], 4) == [2, 1, 1]
    assert on_device(ones, [4, 1, 4], 6) == [3, 1, 2]


def test_nan_cuts_its_row() -> None:
    confidence = np.array([[0.9, np.nan, 0.9], [0.1, 0.1, 0.1]], dtype=np.float32)
    assert on_device(confidence, [3, 3], 4) == [1, 3]


def test_padding_sequences_get_nothing() -> None:
    confidence = np.ones((4, 2), dtype=np.float32)
    assert on_device(confidence, [2, 0, 0, 0], 8) == [2, 0, 0, 0]


@pytest.mark.parametrize("budget", [-1, 0, 3, 100])
def test_a_budget_on_the_device_is_the_same_budget(budget: int) -> None:
    confidence = np.random.default_rng(0).random((4, 5)).astype(np.float32)
    assert on_device(confidence, [5] * 4, torch.tensor(budget)) == on_device(confidence, [5] * 4, budget)
